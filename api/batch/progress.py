"""Where a bulk run is."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """Where a run is."""

    total: int = 0
    finished: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    in_flight: int = 0
    workers: int = 0
    ahead: int = 0  # jobs that get a slot before the first line
    notice: str = ""  # what it waits for, if it waits
    started_at: float = field(default_factory=time.monotonic)
    already: int = 0  # lines that were done before this command

    @property
    def left(self) -> int:
        """Lines that have not ended."""
        return self.total - self.finished - self.failed

    @property
    def seconds(self) -> float:
        """Since this command began."""
        return time.monotonic() - self.started_at

    @property
    def rate(self) -> float:
        """Generated tokens per second."""
        return self.completion_tokens / max(0.5, self.seconds)  # the first moments say nothing
