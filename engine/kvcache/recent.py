"""The contexts that ended lately, by key: who goes on with one of these need not send it again."""

from __future__ import annotations

from collections import deque

from cellama.engine.events import Context

MAX_CONTEXTS = 256
MAX_TOKENS = 1 << 19  # of all together: some tens of MB at most, and most are prompts that exist anyway


class RecentContexts:
    """The last ones, bounded in number and tokens. One thread adds, any thread looks.

    Keys are computed by who looks.
    """

    def __init__(self) -> None:
        self._contexts: deque[Context] = deque()
        self._num_tokens = 0

    def add(self, context: Context) -> None:
        """One more; the oldest go."""
        self._contexts.append(context)
        self._num_tokens += len(context)
        while len(self._contexts) > MAX_CONTEXTS or (self._num_tokens > MAX_TOKENS and len(self._contexts) > 1):
            self._num_tokens -= len(self._contexts.popleft())

    def find(self, key: str, seed: bytes) -> tuple[int, ...] | None:
        """The tokens of the context that has this key with this seed; None if none has."""
        for context in reversed(list(self._contexts)):  # a copy: the owner adds meanwhile
            if context.key == key and context.seed == seed:
                return context.tokens
        return None
