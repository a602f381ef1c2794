"""Run the checks of a client, and print a line for each one. The clients' environments don't contain cellama."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence

MODEL = "tiny"
QUESTION = "What is the weather in Paris?"  # the model calls get_weather without being forced
RESULT = "12 degrees"
TIMEOUT_S = 60.0


def get_weather(city: str) -> str:
    """The weather in a city."""
    assert city, "the call has no city"
    return RESULT


def run(checks: Sequence[tuple[str, Callable[[], None]]]) -> None:
    """Run all checks. Exit with 1 if one has failed."""
    has_failed = False
    for name, check in checks:
        started = time.monotonic()
        try:
            check()
        except Exception:  # clients raise what they like, and the next check must run
            traceback.print_exc()
            print(f"{name}: failed", flush=True)
            has_failed = True
        else:
            print(f"{name}: passed in {time.monotonic() - started:.1f} s", flush=True)
    sys.exit(has_failed)
