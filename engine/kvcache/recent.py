"""The contexts that ended last, by key: a request that continues from one need not send it again."""

from __future__ import annotations

from collections import deque

from cellama.engine.events import Context

MAX_CONTEXTS = 256  # finding one hashes each that is newer: some ms at most; older ones are in Redis
MAX_TOKENS = 1 << 19  # of all together: some tens of MB at most, and most are prompts that exist anyway


class RecentContexts:
    """The last contexts, bounded in number and tokens. One thread adds, any thread looks.

    The thread that looks computes the keys.
    """

    def __init__(self) -> None:
        self._contexts: deque[Context] = deque()
        self._num_tokens = 0

    def add(self, context: Context) -> None:
        """Add a context, and drop the oldest."""
        self._contexts.append(context)
        self._num_tokens += len(context)
        while len(self._contexts) > MAX_CONTEXTS or (self._num_tokens > MAX_TOKENS and len(self._contexts) > 1):
            self._num_tokens -= len(self._contexts.popleft())

    def find(self, key: str, seed: bytes) -> tuple[int, ...] | None:
        """Return the tokens of the context that has this key with this seed; None if there is none."""
        for context in reversed(list(self._contexts)):  # a copy: the owner adds meanwhile
            if context.key == key and context.seed == seed:
                return context.tokens
        return None
