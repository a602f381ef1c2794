"""The third tier: states that come from the folder into RAM, and go there from RAM (docs/adr/014-kept-states.md).

The store's threads read, write and hash. The engine thread copies memory, asks, and takes what has come.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cellama.engine.backend import KvMemory
from cellama.engine.kvstore.counters import StoreCounters
from cellama.engine.kvstore.keys import seed_of
from cellama.engine.kvstore.states import KeptState, StateMatch
from cellama.engine.kvstore.store import StateStore
from cellama.engine.kvstore.worth import longest_wait_s, saved_s, worth_s
from cellama.engine.options import EngineOptions

from .ram_tier import RamTier, SavedState, StateNote

log = logging.getLogger(__name__)

WORTH_READING_TOKENS = 64  # fewer are computed sooner
COPY_SHARE = 0.02  # of the engine's time, for copies of what runs
RUNNING_SHARE = 8  # a state that runs takes at most this part of RAM's quota
FIRST_GUESS = 1000.0  # tokens/s of a prefill, before one is measured
GUESS_TOKENS = 256  # the weight of the guess
MEMORY_TOKENS = 1 << 15  # what was measured longer ago than that hardly counts


class Store(Protocol):
    """What this needs of a StateStore."""

    def longest(self, seed: bytes, tokens: Sequence[int]) -> StateMatch | None: ...

    def load(self, match: StateMatch, on_loaded: Callable[[KeptState | None], None]) -> None: ...

    def offer(self, state: Callable[[], KeptState | None], worth_s: float, num_bytes: int = 0) -> bool: ...

    def note_busy(self, busy: bool) -> None: ...

    def note_saved(self, seconds: float) -> None: ...

    @property
    def is_idle(self) -> bool: ...

    @property
    def read_rate(self) -> float: ...

    @property
    def counters(self) -> StoreCounters: ...

    @property
    def used_bytes(self) -> int: ...

    @property
    def quota_bytes(self) -> int: ...


class PrefillRate:
    """A running mean of tokens/s."""

    def __init__(self) -> None:
        self._tokens, self._seconds = float(GUESS_TOKENS), GUESS_TOKENS / FIRST_GUESS

    def add(self, num_tokens: int, seconds: float) -> None:
        """A decode call of a prompt took so long."""
        self._tokens += num_tokens
        self._seconds += max(seconds, 1e-9)
        if self._tokens > MEMORY_TOKENS:
            self._tokens, self._seconds = self._tokens / 2, self._seconds / 2

    @property
    def tokens_per_s(self) -> float:
        """The mean; a guess before the first."""
        return self._tokens / self._seconds


@dataclass(eq=False, slots=True)
class Load:
    """A state on its way from the folder to RAM."""

    match: StateMatch
    scope: Hashable
    until: float  # the last that a sequence waits for it
    saved_s: float  # over computing the tokens
    is_done: bool = False


class Wait(NamedTuple):
    """A sequence waits for a load, at most until it would have computed what it gets."""

    load: Load
    until: float

    def goes_on(self, now: float) -> bool:
        """True while waiting is faster than computing."""
        return not self.load.is_done and now < self.until


_Loaded = tuple[SavedState, Mapping[int, Any]]  # with its checkpoints


class DiskTier:
    """Loads and saves states of one engine. Engine thread, where nothing else is said."""

    def __init__(
        self, store: Store, memory: KvMemory, ram: RamTier, identity: bytes, nudge: Callable[[], object]
    ) -> None:
        """`nudge` tells the engine thread that something has come."""
        self.store = store
        self.rate = PrefillRate()
        self.num_late = 0  # states that came when they were computed already
        self._memory = memory
        self._ram = ram
        self._identity = identity
        self._nudge = nudge
        self._loads: dict[str, Load] = {}  # by key
        self._done: deque[tuple[Load, _Loaded | None]] = deque()
        self._next_copy = 0.0
        ram.on_saved = self.offer

    # Reading

    def find(self, seed: bytes, tokens: Sequence[int]) -> StateMatch | None:
        """The file with the longest prefix of a prompt. Any thread but the engine's: it may look at the folder."""
        if len(tokens) <= WORTH_READING_TOKENS:
            return None
        try:
            return self.store.longest(seed, tokens)
        except Exception:  # whatever is wrong with the folder, the prompt can be computed
            log.exception("the folder of KV states could not be searched; the prompt is computed")
            return None

    def begin(self, match: StateMatch, scope: Hashable, up_to: int, ready: int, now: float) -> Wait | None:
        """Asks for a file of which up to so many tokens are of use, where `ready` are there; None if not worth it."""
        more = match.usable(up_to) - ready
        if more < WORTH_READING_TOKENS:
            return None
        rate, in_queue = self.rate.tokens_per_s, sum(load.match.num_bytes for load in self._loads.values())
        until = now + longest_wait_s(more, rate)
        if (load := self._loads.get(match.key)) is not None:
            load.until = max(load.until, until)
            return Wait(load, until)
        gain_s = saved_s(more, match.num_bytes + in_queue, rate, self.store.read_rate)
        if gain_s <= 0:
            return None
        if not self._ram.reserve(match.num_bytes):
            return None
        load = self._loads[match.key] = Load(match, scope, until, gain_s)
        try:
            self.store.load(match, partial(self._on_loaded, load))
        except Exception:
            log.exception("a KV state could not be asked for; it is computed")
            self._end(load, now)
            return None
        return Wait(load, until)

    def _on_loaded(self, load: Load, kept: KeptState | None) -> None:
        """The thread that reads."""
        loaded = None
        if kept is not None:
            try:
                loaded = self._from_kept(kept, load.scope)
            except Exception:
                log.exception("a KV state can't be used here; it is computed again")
        self._done.append((load, loaded))
        self._nudge()

    def _from_kept(self, kept: KeptState, scope: Hashable) -> _Loaded:
        data, num_tokens = self._memory.from_portable(kept.data)
        tokens = tuple(kept.tokens)
        if not len(tokens) - 1 <= num_tokens <= len(tokens):
            raise ValueError(f"it holds {num_tokens} tokens and names {len(tokens)}")
        checkpoints = {}
        for length, part in kept.checkpoints.items():
            checkpoints[length], told = self._memory.from_portable(part, checkpoint=True)
            if told != length:
                raise ValueError(f"a checkpoint of {told} tokens is named one of {length}")
        state = SavedState(
            tokens=tokens[:num_tokens],
            first_cut=min(kept.first_cut, num_tokens),
            scope=scope,
            data=data,
            tier="disk",
            note=StateNote(next_token=tokens[num_tokens] if num_tokens < len(tokens) else None),
            from_disk=True,
        )
        return state, checkpoints

    def receive(self, now: float) -> None:
        """What was read is in RAM from now on, if there is still room."""
        while self._done:
            load, loaded = self._done.popleft()
            self._end(load, now)
            if loaded is not None:
                if now >= load.until:
                    self.num_late += 1
                else:
                    self.store.note_saved(load.saved_s)
                self._ram.adopt(*loaded)

    def _end(self, load: Load, now: float) -> None:
        load.is_done = True
        del self._loads[load.match.key]
        self._ram.reserved_bytes -= load.match.num_bytes

    def wait_s(self, now: float) -> float:
        """How long a sequence still waits for a file at most; 0 if none does."""
        return max((load.until - now for load in self._loads.values()), default=0.0)

    # Writing

    def offer(self, state: SavedState) -> None:
        """The folder may have a state that is in RAM; whether it is written, the store decides."""
        if state.from_disk or (seed := self._seed_maker(state.scope)) is None:
            return
        checkpoints = self._ram.checkpoints_of(state)
        num_bytes = state.num_bytes + sum(data.nbytes for data in checkpoints.values())
        rates = (self.rate.tokens_per_s, self.store.read_rate)
        worth = worth_s(state.num_tokens, num_bytes, *rates, state.note.reuse_probability)
        try:
            self.store.offer(partial(self._kept, state, checkpoints, seed), worth, num_bytes)
        except Exception:
            log.exception("a KV state could not be offered to the folder")

    def _seed_maker(self, scope: Hashable) -> Callable[[], bytes] | None:
        """What makes the seed of a sequence's scope; None for a scope that is a sequence's own."""
        if isinstance(scope, str):
            return partial(seed_of, self._identity, (), scope)
        if isinstance(scope, tuple):
            name, adapters = scope
            return partial(seed_of, self._identity, adapters, name)
        return None

    def _kept(self, state: SavedState, checkpoints: Mapping[int, Any], seed: Callable[[], bytes]) -> KeptState | None:
        """The thread that writes; None for a state that has no portable form."""
        portable, scope = self._memory.portable, state.scope
        last = () if state.note.next_token is None else (state.note.next_token,)
        try:
            return KeptState(
                seed(),
                (*state.tokens, *last),
                state.first_cut,
                portable(state.data, state.num_tokens),
                {length: portable(data, length, checkpoint=True) for length, data in checkpoints.items()},
                scope if isinstance(scope, str) else str(scope[0]) if isinstance(scope, tuple) else "",
            )
        except ValueError as error:
            log.debug("a KV state of %d tokens has no portable form: %s", state.num_tokens, error)
            return None

    def may_copy(self, now: float) -> bool:
        """True if there is time to copy what a running sequence has."""
        return now >= self._next_copy and self.store.is_idle

    def save_running(self, slot: int, tokens: Sequence[int], scope: Hashable) -> None:
        """Copies what a running sequence has, and offers it: if the process dies another one goes on from there."""
        started = time.monotonic()
        if self._memory.state_bytes(slot) * RUNNING_SHARE <= self._ram.quota_bytes:
            self._ram.save(slot, tokens, scope)
        now = time.monotonic()
        self._next_copy = now + (now - started) / COPY_SHARE


def open_store(options: EngineOptions, identity: bytes) -> StateStore | None:
    """The folder of states that the options name; None if there is none, or nothing would be kept."""
    if options.cache_dir is None or not options.keeps_states:
        return None
    folder = Path(options.cache_dir).expanduser()
    return StateStore(folder, options.cache_disk_bytes, identity, options.queue_bytes, options.spare_bytes)
