"""Looking again and again, until Ctrl-C."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

from rich.console import RenderableType
from rich.live import Live

from cellama.api.cli.output import out
from cellama.tasks.contract.errors import RedisRefused, RedisUnreachable

Seen = TypeVar("Seen")


def watch(
    look: Callable[[], Seen], render: Callable[[Seen, str | None], RenderableType], every_s: float, *, whole: bool
) -> None:
    """Shows what is seen, with a problem if there is one: what was seen last stays while Redis does not answer.

    With `whole` it takes the whole terminal. Raises what the first look raises.
    """
    with contextlib.suppress(KeyboardInterrupt):  # that is how it ends
        seen, problem = look(), None
        with Live(console=out, screen=whole and out.is_terminal, auto_refresh=False) as live:
            while True:
                live.update(render(seen, problem), refresh=True)
                time.sleep(every_s)
                try:
                    seen, problem = look(), None
                except (RedisUnreachable, RedisRefused) as error:
                    problem = str(error)
