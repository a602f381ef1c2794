"""The disk tier of the KV cache: load states from the cache directory into RAM, and save states from RAM (ADR 014).

The store's threads read, write and hash files. The engine thread copies memory, requests files and receives their
contents.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cellama.config.logging import event_logger
from cellama.engine.backend import KvMemory
from cellama.engine.kvstore.benefit import RunningRate, saved_s
from cellama.engine.kvstore.keys import BLOCK, seed_of
from cellama.engine.kvstore.states import StateMatch, StoredState
from cellama.engine.kvstore.store import StateStore
from cellama.engine.options import EngineOptions

from .ram_tier import RamTier, SavedState, StateNote

log = event_logger(__name__)

COPY_SHARE = 0.02  # maximum share of the engine thread's time that copies of running sequences take
# The copy of a running sequence may take at most 1/8 of RAM's quota, because it is rarely used.
MAX_RUNNING_FRACTION = 8
INITIAL_PREFILL_RATE = 1000.0  # tokens/s until a prefill is measured: a small model on a CPU, or a large one on a GPU
INITIAL_PREFILL_TOKENS = 256  # weight of the initial rate in tokens: a short prompt
PREFILL_MEMORY_TOKENS = 1 << 15  # tokens after which a measurement has little weight


@dataclass(eq=False, slots=True)
class StateLoad:
    """A state that is being read from the cache directory into RAM."""

    match: StateMatch
    scope: Hashable
    until: float  # time at which the last sequence stops waiting for it
    saved_s: float  # seconds saved over computing the tokens
    is_done: bool = False


class LoadWait(NamedTuple):
    """A sequence that waits for a load. The sequence waits no longer than computing the tokens would take."""

    load: StateLoad
    until: float

    def continues(self, now: float) -> bool:
        """Return whether the sequence should keep waiting."""
        return not self.load.is_done and now < self.until


class LoadedState(NamedTuple):
    """A loaded state and its checkpoints."""

    state: SavedState
    checkpoints: Mapping[int, Any]  # by length in tokens


class DiskTier:
    """Loads and saves the states of one engine.

    Only the engine thread may use this class, unless a method's docstring says otherwise.
    """

    def __init__(
        self, store: StateStore, memory: KvMemory, ram: RamTier, identity: bytes, nudge: Callable[[], object]
    ) -> None:
        """Connect the store to the RAM tier. `nudge` wakes the engine thread when a file has been read."""
        self.store = store
        self.prefill_rate = RunningRate(INITIAL_PREFILL_RATE, INITIAL_PREFILL_TOKENS, PREFILL_MEMORY_TOKENS)  # tokens/s
        self.num_late = 0  # states that arrived after their tokens had been computed
        self._memory = memory
        self._ram = ram
        self._identity = identity
        self._nudge = nudge
        self._loads: dict[str, StateLoad] = {}  # unfinished loads by key
        self._done: deque[tuple[StateLoad, LoadedState | None]] = deque()
        self._next_copy_at = 0.0
        ram.on_saved = self.offer

    # Reading

    def find(self, seed: bytes, tokens: Sequence[int]) -> StateMatch | None:
        """Return the stored state with the longest prefix of a prompt, or None.

        Don't call this method on the engine thread, because it may read the directory.
        """
        try:
            return self.store.longest(seed, tokens)
        except Exception:  # the prompt can be computed without the directory
            log.exception("KV state lookup failed", detail="unexpected error; the whole prompt is prefilled")
            return None

    def begin(self, match: StateMatch, scope: Hashable, up_to: int, ready: int, now: float) -> LoadWait | None:
        """Start loading a stored state, of which the caller can use at most `up_to` tokens.

        Return None if nothing is loaded. `ready` is the number of leading tokens that are already on the device or in
        RAM. Nothing is loaded if computing the tokens is faster, or if RAM has no space for the state.
        """
        num_more = match.usable(up_to) - ready
        if num_more < BLOCK:
            return None
        until = now + num_more / self.prefill_rate.per_s
        if (load := self._loads.get(match.head.key)) is not None:
            load.until = max(load.until, until)
            return LoadWait(load, until)
        num_bytes = match.head.num_bytes + sum(load.match.head.num_bytes for load in self._loads.values())
        gain_s = saved_s(num_more, num_bytes, self.prefill_rate.per_s, self.store.read_rate)
        if gain_s <= 0 or not self._ram.reserve(match.head.num_bytes):
            return None
        load = self._loads[match.head.key] = StateLoad(match=match, scope=scope, until=until, saved_s=gain_s)
        self.store.load(match, partial(self._on_loaded, load))
        return LoadWait(load, until)

    def _on_loaded(self, load: StateLoad, stored: StoredState | None) -> None:
        """Convert the loaded state and wake the engine thread. The store's reader thread calls this method."""
        loaded = None
        if stored is not None:
            try:
                loaded = self._from_stored(stored, load.scope)
            except Exception:
                log.exception("KV state not converted", detail="unusable format; the state's tokens will be recomputed")
        self._done.append((load, loaded))
        self._nudge()

    def _from_stored(self, stored: StoredState, scope: Hashable) -> LoadedState:
        data, num_tokens = self._memory.from_portable(stored.data)
        tokens = tuple(stored.tokens)
        if not len(tokens) - 1 <= num_tokens <= len(tokens):
            raise ValueError(f"the state has {num_tokens} tokens, but its header lists {len(tokens)}")
        checkpoints = {}
        for length, part in stored.checkpoints.items():
            checkpoints[length], num_held = self._memory.from_portable(part, checkpoint=True)
            if num_held != length:
                raise ValueError(f"a checkpoint has {num_held} tokens, but its header lists {length}")
        state = SavedState(
            tokens=tokens[:num_tokens],
            first_cut=min(stored.first_cut, num_tokens),
            scope=scope,
            data=data,
            tier="disk",
            note=StateNote(next_token=tokens[num_tokens] if num_tokens < len(tokens) else None),
            from_disk=True,
        )
        return LoadedState(state, checkpoints)

    def receive(self, now: float) -> None:
        """Move the states that have been read into the RAM tier, if they still fit."""
        while self._done:
            load, loaded = self._done.popleft()
            load.is_done = True
            del self._loads[load.match.head.key]
            self._ram.release(load.match.head.num_bytes)
            if loaded is None:
                continue
            if now >= load.until:
                self.num_late += 1
            else:
                self.store.note_saved(load.saved_s)
            self._ram.adopt(loaded.state, loaded.checkpoints)

    def wait_s(self, now: float) -> float:
        """Return the longest time in seconds for which a sequence will still wait for a file, or 0."""
        return max((load.until - now for load in self._loads.values()), default=0.0)

    # Writing

    def offer(self, state: SavedState) -> None:
        """Offer a state in RAM to the store.

        States that were read from disk, and states that only a single sequence can use, are not offered.
        """
        seed = self._seed_maker(state.scope)
        if state.from_disk or seed is None:
            return
        checkpoints = self._ram.checkpoints_of(state)
        num_bytes = state.num_bytes + sum(data.nbytes for data in checkpoints.values())
        gain_s = saved_s(state.num_tokens, num_bytes, self.prefill_rate.per_s, self.store.read_rate)
        make = partial(self._to_stored, state, checkpoints, seed)
        self.store.offer(make, gain_s * state.note.reuse_probability, num_bytes)

    def _seed_maker(self, scope: Hashable) -> Callable[[], bytes] | None:
        """Return a function that computes a scope's seed, or None if only a single sequence uses the scope.

        The function is called on another thread.
        """
        if isinstance(scope, str):
            return partial(seed_of, self._identity, (), scope)
        if isinstance(scope, tuple):
            name, adapters = scope
            return partial(seed_of, self._identity, adapters, name)
        return None

    def _to_stored(
        self, state: SavedState, checkpoints: Mapping[int, Any], seed: Callable[[], bytes]
    ) -> StoredState | None:
        """Convert a state for the store, or return None if the state has no portable format.

        The store's writer thread calls this method.
        """
        portable, scope = self._memory.portable, state.scope
        last = () if state.note.next_token is None else (state.note.next_token,)
        try:
            return StoredState(
                seed=seed(),
                tokens=(*state.tokens, *last),
                first_cut=state.first_cut,
                data=portable(state.data, state.num_tokens),
                checkpoints={length: portable(data, length, checkpoint=True) for length, data in checkpoints.items()},
                scope=scope if isinstance(scope, str) else str(scope[0]) if isinstance(scope, tuple) else "",
            )
        except ValueError as error:
            log.debug("KV state not converted", num_tokens=state.num_tokens, reason=str(error))
            return None

    def may_copy(self, now: float) -> bool:
        """Return whether a running sequence's state may be copied now.

        A copy is allowed if the writer is idle and enough time has passed since the previous copy (COPY_SHARE).
        """
        return now >= self._next_copy_at and self.store.is_idle

    def save_running(self, slot: int, tokens: Sequence[int], scope: Hashable) -> None:
        """Copy a running sequence's state, and offer the copy to the store for resuming the sequence after a crash."""
        started = time.monotonic()
        if self._memory.state_bytes(slot) * MAX_RUNNING_FRACTION <= self._ram.quota_bytes:
            self._ram.save(slot, tokens, scope)
        now = time.monotonic()
        self._next_copy_at = now + (now - started) / COPY_SHARE


def open_store(options: EngineOptions, identity: bytes) -> StateStore | None:
    """Open the state directory given by the options, or return None if the options disable saving states to disk."""
    if options.cache_dir is None or not options.keeps_states:
        return None
    return StateStore(
        Path(options.cache_dir).expanduser(),
        options.cache_disk_bytes,
        identity,
        queue_bytes=options.queue_bytes,
        warm_bytes=options.warm_bytes,
    )
