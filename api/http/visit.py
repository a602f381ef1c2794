"""What a request holds while it is handled: its charge, and memory for its body."""

from __future__ import annotations

from collections import Counter

from .callers import Admission, Caller, Unlimited
from .errors import ApiError

RETRY_S = 1.0  # when another request ends can't be known


class BodyMemory:
    """Memory for bodies: of all requests, and of those with the same key. Event loop only."""

    def __init__(self, max_bytes: int, max_key_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_key_bytes = max_key_bytes
        self._of_keys: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """How much of it is taken."""
        return self._of_keys.total()

    def take(self, holder: str, num_bytes: int, own_bytes: int) -> None:
        """Take memory for a request that has `own_bytes` already. A request that is alone is never refused. Raises
        ApiError: 429 for a key that has too much, 503 if all of it is taken."""
        of_key, of_all = self._of_keys[holder], self.num_bytes
        if of_key > own_bytes and of_key + num_bytes > self._max_key_bytes:
            raise ApiError(
                429,
                f"the bodies of this key's requests take {of_key} bytes of memory, and the limit is "
                f"{self._max_key_bytes} (gateway_key_bodies_bytes); send this one when others have ended",
                code="too_many_bytes",
                retry_after_s=RETRY_S,
            )
        if of_all > own_bytes and of_all + num_bytes > self._max_bytes:
            raise ApiError(
                503,
                f"the bodies of all requests take {of_all} bytes of memory, and the limit is {self._max_bytes} "
                "(gateway_bodies_bytes); send this one again soon",
                code="overloaded",
                retry_after_s=RETRY_S,
            )
        self._of_keys[holder] += num_bytes

    def give_back(self, holder: str, num_bytes: int) -> None:
        self._of_keys[holder] -= num_bytes
        if not self._of_keys[holder]:
            del self._of_keys[holder]


class Visit:
    """One request. Whatever it still holds when it ends is given back by the middleware that made this."""

    def __init__(self, memory: BodyMemory | None = None) -> None:
        self.admission: Admission = Unlimited()
        self._memory = memory
        self._holder = ""
        self._num_bytes = 0

    def hold(self, caller: Caller, num_bytes: int) -> None:
        """Take memory until the request ends. Raises ApiError as BodyMemory.take."""
        if self._memory is not None:
            self._holder = caller.key_id or caller.tenant or ""
            self._memory.take(self._holder, num_bytes, self._num_bytes)
            self._num_bytes += num_bytes

    def hand_over(self) -> Admission:
        """Return the charge, which the one who asks for it settles from now on."""
        admission, self.admission = self.admission, Unlimited()
        return admission

    def leave(self) -> None:
        """Give the memory back."""
        if self._memory is not None and self._num_bytes:
            self._memory.give_back(self._holder, self._num_bytes)
            self._num_bytes = 0
