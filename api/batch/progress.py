"""Where a bulk run is."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens")
CLOCK_S = 1e-6  # the least that a rate divides by


@dataclass(slots=True)
class Progress:
    """Where a run is. Lines and tokens are those of all its commands, rates those of this one."""

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
    already: int = 0  # lines that had ended before this command
    tokens_before: int = 0  # of `completion_tokens`, those of earlier commands

    @property
    def left(self) -> int:
        """Lines that have not ended."""
        return self.total - self.finished - self.failed

    @property
    def seconds(self) -> float:
        """Since this command began."""
        return time.monotonic() - self.started_at

    @property
    def ended(self) -> int:
        """Lines that this command has brought to an end."""
        return self.finished + self.failed - self.already

    @property
    def generated(self) -> int:
        """Tokens that this command has generated."""
        return self.completion_tokens - self.tokens_before

    @property
    def rate(self) -> float:
        """Generated tokens per second."""
        return self.generated / max(CLOCK_S, self.seconds)

    @property
    def line_rate(self) -> float:
        """Lines per second."""
        return self.ended / max(CLOCK_S, self.seconds)
