"""The sequences of one request: `n` completions of one prompt, which end together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cellama.engine.events import Completion, Usage
from cellama.engine.scheduling.sequence import Sequence

from .handle import Handle


@dataclass(eq=False, slots=True)
class Group:
    """Engine thread only."""

    handle: Handle
    sequences: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)  # those that have not ended
    finished: list[Completion] = field(default_factory=list)  # in the order of their ends

    def completion(self) -> Completion:
        """The first completion, with the others as its alternatives and the tokens of all in its usage."""
        first, *others = sorted(self.finished, key=lambda completion: completion.index)
        if not others:
            return first
        generated = sum(completion.usage.completion_tokens for completion in self.finished)
        usage = Usage(first.usage.prompt_tokens, generated, first.usage.cached_tokens)
        return replace(first, usage=usage, alternatives=tuple(others))
