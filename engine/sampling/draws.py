"""Numbers that belong to a seed, a place and a token: what makes draws the same anywhere."""

from __future__ import annotations

import zlib

import numpy as np

from .filters import (
    Ids,
    Values,
)


def uniforms(seed: int, position: int, purpose: str, ids: Ids) -> Values:
    """A number in (0, 1) for each id, that depends on the arguments alone: splitmix64 of all of them."""
    key = (seed << 32 | position) ^ zlib.crc32(purpose.encode()) << 16
    state = ids.astype(np.uint64) + np.uint64(_mix(key))
    state = state * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return ((state >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix(value: int) -> int:
    """splitmix64 of one number."""
    mask = (1 << 64) - 1
    value = value + 0x9E3779B97F4A7C15 & mask
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
    return value ^ value >> 31
