"""How much of a prompt is there already: a look from any thread, at copies, that is right but for a moment."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from cellama.engine.events import CacheTier

from .manager import KvCache
from .prefix import common_length

Held = tuple[Sequence[int], Hashable]  # what is computed in a slot, and its scope


def probe(
    cache: KvCache, slots: Iterable[Held | None], tokens: tuple[int, ...], scope: Hashable
) -> dict[CacheTier, int]:
    """The most of these tokens that a slot has, and a state in RAM. Nothing of the device itself is asked."""
    on_device = [_usable(cache, slot, h[0], tokens, None) for slot, h in enumerate(slots) if h and h[1] == scope]
    in_ram = [
        _usable(cache, state, state.tokens, tokens, state.first_cut)
        for state in cache.ram.states()
        if state.scope == scope
    ]
    return {"device": max(on_device, default=0), "ram": max(in_ram, default=0)}


def _usable(
    cache: KvCache, holder: Hashable, held: Sequence[int], tokens: tuple[int, ...], first_cut: int | None
) -> int:
    shared = common_length(tuple(held), tokens)
    if first_cut is None:
        first_cut = 0 if cache.memory.partial_reuse else len(held)
    if shared >= first_cut:
        return shared
    return max((length for length in cache.checkpoints.lengths(holder) if length <= shared), default=0)
