"""Choose the sizes that the options don't specify: the context per slot, and the RAM quota for saved states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cellama.engine.options import DEFAULT_SAVED_BYTES

from .budget import ALL_DEVICES, CPU, AvailableMemory, Footprint, MemoryUse

KV_SHARE = 0.5  # largest share of the available memory for a KV cache of open size, so that another model fits
MIN_TOKENS = 512  # minimum context of a slot in tokens: less is useless for chats
STREAM_PADDING = 256  # llama.cpp pads a KV stream to a multiple of this number of cells
MAX_TRIES = 8  # number of contexts to measure: two define the line that sizes follow, the others correct it
RAM_SHARE = 0.25  # largest share of the available memory for saved states with an open quota


def choose_ctx(
    measure: Callable[[int], Footprint], available: AvailableMemory, n_ctx_train: int, *, first: int | None = None
) -> tuple[int, Footprint]:
    """Choose the number of tokens per slot, and return this number and the resulting footprint.

    If even the minimum does not fit, return the minimum. `measure` returns the footprint for a number of tokens per
    slot. `first` is the first number to try.
    """
    minimum = min(MIN_TOKENS, n_ctx_train)
    best = minimum, measure(minimum)
    candidate = min(n_ctx_train, first or n_ctx_train)
    for _ in range(MAX_TRIES):
        if candidate <= best[0] or _fullness(best[1], available) > 1:
            break
        found = measure(candidate)
        fits = _fullness(found, available) <= 1
        following = _affordable(best, (candidate, found), available, n_ctx_train)
        if fits:
            best = candidate, found
        elif following >= candidate:  # the line predicts too much
            following = candidate - max(STREAM_PADDING, candidate // 10)
        candidate = following
    return best


def _affordable(
    one: tuple[int, Footprint], other: tuple[int, Footprint], available: AvailableMemory, max_tokens: int
) -> int:
    """Return the number of tokens that fit if the footprint grows linearly.

    `one` and `other` are two measured points, each with a number of tokens and a footprint.
    """
    tokens = float(max_tokens)
    for start, end in zip(_constraints(one[1], available), _constraints(other[1], available), strict=True):
        slope = (end - start) / (other[0] - one[0])
        if slope > 0:
            tokens = min(tokens, one[0] + (1 - start) / slope)
    return max_tokens if tokens >= max_tokens else int(tokens) // STREAM_PADDING * STREAM_PADDING


def _fullness(footprint: Footprint, available: AvailableMemory) -> float:
    return max(_constraints(footprint, available), default=0.0)


def _constraints(footprint: Footprint, available: AvailableMemory) -> list[float]:
    """Return the share of each limit that a footprint uses, where 1 is the entire limit."""
    cells = {name: usage.kv_bytes for name, usage in footprint.devices.items()}
    cells[ALL_DEVICES] = sum(cells.values())
    filled = []
    for name, free in available.free.items():
        total = available.needed(footprint).get(name, 0)
        filled += [total / max(1, free), cells.get(name, 0) / max(1.0, free * KV_SHARE)]
    return filled


def choose_quota(requested: int | None, footprint: Footprint, available: AvailableMemory) -> int:
    """Return the requested quota for saved states, or by default a quota that fits alongside this model."""
    if requested is not None:
        return requested
    free = [
        available.free[name] - footprint.on(name).total_bytes for name in (CPU, ALL_DEVICES) if name in available.free
    ]
    return max(0, min([DEFAULT_SAVED_BYTES, *(int(size * RAM_SHARE) for size in free)]))


def with_quota(footprint: Footprint, num_bytes: int) -> Footprint:
    """Return the footprint with this number of bytes reserved for saved states in RAM."""
    cpu = footprint.devices.get(CPU, MemoryUse())
    return Footprint({**footprint.devices, CPU: replace(cpu, saved_bytes=num_bytes)})
