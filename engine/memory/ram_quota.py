"""The RAM that a model's saved states may take: what was asked for, or a part of what is left. Pure."""

from __future__ import annotations

from dataclasses import replace

from cellama.engine.options import DEFAULT_SAVED_BYTES

from .budget import ALL_DEVICES, CPU, Footprint, Room, Usage

RAM_SHARE = 0.25  # of what is left then, at most: other models shall find room, too


def choose_quota(wanted: int | None, footprint: Footprint, room: Room) -> int:
    """Bytes for saved states beside a model that takes this."""
    if wanted is not None:
        return wanted
    left = [room.free[name] - footprint.on(name).total_bytes for name in (CPU, ALL_DEVICES) if name in room.free]
    return max(0, min([DEFAULT_SAVED_BYTES, *(int(free * RAM_SHARE) for free in left)]))


def with_quota(footprint: Footprint, num_bytes: int) -> Footprint:
    """The same model with so much RAM for saved states."""
    cpu = footprint.devices.get(CPU, Usage())
    return Footprint({**footprint.devices, CPU: replace(cpu, saved_bytes=num_bytes)})
