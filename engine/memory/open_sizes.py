"""The sizes that options leave open: the context of a slot, and the RAM for saved states. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cellama.engine.options import DEFAULT_SAVED_BYTES

from .budget import ALL_DEVICES, CPU, Footprint, MemoryUse, Room

KV_SHARE = 0.5  # of what is left, at most, for a KV cache whose size was left open: another model should find room
LEAST_TOKENS = 512  # tokens of a slot's context, at least: less is of no use for chats
STREAM_PADDING = 256  # llama.cpp pads a KV stream to a multiple of so many cells
MAX_TRIES = 8  # contexts that are measured: two find the line that sizes follow, the others correct it
RAM_SHARE = 0.25  # of what is left, at most, for saved states whose quota was left open: as KV_SHARE


def choose_ctx(
    measure: Callable[[int], Footprint], room: Room, n_ctx_train: int, *, first: int | None = None
) -> tuple[int, Footprint]:
    """The tokens per slot, and what the model takes with them; the least there is, if not even that fits.

    `measure` gives the footprint with a context of so many tokens per slot; `first` is the one to try at first.
    """
    least = min(LEAST_TOKENS, n_ctx_train)
    best = least, measure(least)
    guess = min(n_ctx_train, first or n_ctx_train)
    for _ in range(MAX_TRIES):
        if guess <= best[0] or _fullness(best[1], room) > 1:
            break
        found = measure(guess)
        fits = _fullness(found, room) <= 1
        following = _affordable(best, (guess, found), room, n_ctx_train)
        if fits:
            best = guess, found
        elif following >= guess:  # what a line says is too much
            following = guess - max(STREAM_PADDING, guess // 10)
        guess = following
    return best


def _affordable(one: tuple[int, Footprint], other: tuple[int, Footprint], room: Room, most: int) -> int:
    """The tokens that fit, if what a context takes grows along a line through these two."""
    tokens = float(most)
    for start, end in zip(_constraints(one[1], room), _constraints(other[1], room), strict=True):
        slope = (end - start) / (other[0] - one[0])
        if slope > 0:
            tokens = min(tokens, one[0] + (1 - start) / slope)
    return most if tokens >= most else int(tokens) // STREAM_PADDING * STREAM_PADDING


def _fullness(footprint: Footprint, room: Room) -> float:
    return max(_constraints(footprint, room), default=0.0)


def _constraints(footprint: Footprint, room: Room) -> list[float]:
    """What a footprint takes of each limit; 1 is all of it."""
    cells = {name: usage.kv_bytes for name, usage in footprint.devices.items()}
    cells[ALL_DEVICES] = sum(cells.values())
    filled = []
    for name, free in room.free.items():
        total = room.needed(footprint).get(name, 0)
        filled += [total / max(1, free), cells.get(name, 0) / max(1.0, free * KV_SHARE)]
    return filled


def choose_quota(wanted: int | None, footprint: Footprint, room: Room) -> int:
    """Bytes for saved states beside a model that takes this."""
    if wanted is not None:
        return wanted
    left = [room.free[name] - footprint.on(name).total_bytes for name in (CPU, ALL_DEVICES) if name in room.free]
    return max(0, min([DEFAULT_SAVED_BYTES, *(int(free * RAM_SHARE) for free in left)]))


def with_quota(footprint: Footprint, num_bytes: int) -> Footprint:
    """The same model with so much RAM for saved states."""
    cpu = footprint.devices.get(CPU, MemoryUse())
    return Footprint({**footprint.devices, CPU: replace(cpu, saved_bytes=num_bytes)})
