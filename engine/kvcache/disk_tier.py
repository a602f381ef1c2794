"""The third tier: states that come from the directory into RAM, and go there from RAM (docs/adr/014-kept-states.md).

The store's threads read, write and hash. The engine thread copies memory, asks for files, and takes what has come.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cellama.engine.backend import KvMemory
from cellama.engine.kvstore.benefit import RunningRate, saved_s
from cellama.engine.kvstore.keys import BLOCK, seed_of
from cellama.engine.kvstore.states import KeptState, StateMatch
from cellama.engine.kvstore.store import StateStore
from cellama.engine.options import EngineOptions

from .ram_tier import RamTier, SavedState, StateNote

log = logging.getLogger(__name__)

COPY_SHARE = 0.02  # of the engine thread's time, for copies of running sequences
RUNNING_SHARE = 8  # the copy of a running sequence takes at most this part of RAM's quota: it is seldom needed
PREFILL_GUESS = 1000.0  # tokens/s, before a prefill is measured: a small model on a processor, or a large one on a GPU
PREFILL_GUESS_TOKENS = 256  # the weight of the guess: a short prompt
PREFILL_MEMORY_TOKENS = 1 << 15  # what was computed before these tokens hardly counts


@dataclass(eq=False, slots=True)
class StateLoad:
    """A state on its way from the directory to RAM."""

    match: StateMatch
    scope: Hashable
    until: float  # the last that a sequence waits for it
    saved_s: float  # over computing the tokens
    is_done: bool = False


class LoadWait(NamedTuple):
    """A sequence waits for a load, at most as long as computing takes."""

    load: StateLoad
    until: float

    def continues(self, now: float) -> bool:
        """True while waiting is faster than computing."""
        return not self.load.is_done and now < self.until


class LoadedState(NamedTuple):
    """What a load brought."""

    state: SavedState
    checkpoints: Mapping[int, Any]  # by length


class DiskTier:
    """Loads and saves states of one engine. Engine thread, unless a method says otherwise."""

    def __init__(
        self, store: StateStore, memory: KvMemory, ram: RamTier, identity: bytes, nudge: Callable[[], object]
    ) -> None:
        """`nudge` wakes the engine thread when a file has been read."""
        self.store = store
        self.prefill_rate = RunningRate(PREFILL_GUESS, PREFILL_GUESS_TOKENS, PREFILL_MEMORY_TOKENS)  # tokens/s
        self.num_late = 0  # states that came when they were computed already
        self._memory = memory
        self._ram = ram
        self._identity = identity
        self._nudge = nudge
        self._loads: dict[str, StateLoad] = {}  # by key
        self._done: deque[tuple[StateLoad, LoadedState | None]] = deque()
        self._next_copy_at = 0.0
        ram.on_saved = self.offer

    # Reading

    def find(self, seed: bytes, tokens: Sequence[int]) -> StateMatch | None:
        """Return the file with the longest prefix of a prompt. Not for the engine thread: it may read the directory."""
        try:
            return self.store.longest(seed, tokens)
        except Exception:  # whatever is wrong with the directory, the prompt can be computed
            log.exception("disk tier: can't search the directory of KV states; the prompt is computed")
            return None

    def begin(self, match: StateMatch, scope: Hashable, up_to: int, ready: int, now: float) -> LoadWait | None:
        """Ask for a file of which up to `up_to` tokens are of use; None if computing is faster, or RAM has no room.

        `ready` of the tokens are on the device or in RAM already.
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

    def _on_loaded(self, load: StateLoad, kept: KeptState | None) -> None:
        """The reading thread calls this."""
        loaded = None
        if kept is not None:
            try:
                loaded = self._from_kept(kept, load.scope)
            except Exception:
                log.exception("disk tier: a KV state can't be used here; it is computed again")
        self._done.append((load, loaded))
        self._nudge()

    def _from_kept(self, kept: KeptState, scope: Hashable) -> LoadedState:
        data, num_tokens = self._memory.from_portable(kept.data)
        tokens = tuple(kept.tokens)
        if not len(tokens) - 1 <= num_tokens <= len(tokens):
            raise ValueError(f"it holds {num_tokens} tokens and names {len(tokens)}")
        checkpoints = {}
        for length, part in kept.checkpoints.items():
            checkpoints[length], num_held = self._memory.from_portable(part, checkpoint=True)
            if num_held != length:
                raise ValueError(f"a checkpoint of {num_held} tokens is named one of {length}")
        state = SavedState(
            tokens=tokens[:num_tokens],
            first_cut=min(kept.first_cut, num_tokens),
            scope=scope,
            data=data,
            tier="disk",
            note=StateNote(next_token=tokens[num_tokens] if num_tokens < len(tokens) else None),
            from_disk=True,
        )
        return LoadedState(state, checkpoints)

    def receive(self, now: float) -> None:
        """Put what was read into RAM, if there is still room."""
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
        """Return how long a sequence still waits for a file at most; 0 if none does."""
        return max((load.until - now for load in self._loads.values()), default=0.0)

    # Writing

    def offer(self, state: SavedState) -> None:
        """Offer the store a state that is in RAM, unless it comes from there or belongs to one sequence alone."""
        seed = self._seed_maker(state.scope)
        if state.from_disk or seed is None:
            return
        checkpoints = self._ram.checkpoints_of(state)
        num_bytes = state.num_bytes + sum(data.nbytes for data in checkpoints.values())
        gain_s = saved_s(state.num_tokens, num_bytes, self.prefill_rate.per_s, self.store.read_rate)
        make = partial(self._kept, state, checkpoints, seed)
        self.store.offer(make, gain_s * state.note.reuse_probability, num_bytes)

    def _seed_maker(self, scope: Hashable) -> Callable[[], bytes] | None:
        """Return what hashes the seed of a scope, on another thread; None for the scope of one sequence alone."""
        if isinstance(scope, str):
            return partial(seed_of, self._identity, (), scope)
        if isinstance(scope, tuple):
            name, adapters = scope
            return partial(seed_of, self._identity, adapters, name)
        return None

    def _kept(self, state: SavedState, checkpoints: Mapping[int, Any], seed: Callable[[], bytes]) -> KeptState | None:
        """The writing thread calls this. Return None for a state that has no portable form."""
        portable, scope = self._memory.portable, state.scope
        last = () if state.note.next_token is None else (state.note.next_token,)
        try:
            return KeptState(
                seed=seed(),
                tokens=(*state.tokens, *last),
                first_cut=state.first_cut,
                data=portable(state.data, state.num_tokens),
                checkpoints={length: portable(data, length, checkpoint=True) for length, data in checkpoints.items()},
                scope=scope if isinstance(scope, str) else str(scope[0]) if isinstance(scope, tuple) else "",
            )
        except ValueError as error:
            log.debug("disk tier: a KV state of %d tokens has no portable form: %s", state.num_tokens, error)
            return None

    def may_copy(self, now: float) -> bool:
        """True if there is time to copy what a running sequence has, and to write it."""
        return now >= self._next_copy_at and self.store.is_idle

    def save_running(self, slot: int, tokens: Sequence[int], scope: Hashable) -> None:
        """Copy what a running sequence has, and offer it: another process continues from it if this one dies."""
        started = time.monotonic()
        if self._memory.state_bytes(slot) * RUNNING_SHARE <= self._ram.quota_bytes:
            self._ram.save(slot, tokens, scope)
        now = time.monotonic()
        self._next_copy_at = now + (now - started) / COPY_SHARE


def open_store(options: EngineOptions, identity: bytes) -> StateStore | None:
    """Open the directory of states that the options name; None if there is none, or nothing would be kept."""
    if options.cache_dir is None or not options.keeps_states:
        return None
    return StateStore(
        Path(options.cache_dir).expanduser(),
        options.cache_disk_bytes,
        identity,
        queue_bytes=options.queue_bytes,
        warm_bytes=options.warm_bytes,
    )
