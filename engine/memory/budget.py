"""What models may take of the machine's memory: the arithmetic, without a model or a device.

In "auto", what is left is what the devices have free, less a margin, less what loads in flight will take. Mapped
weights need a care of their own: a system counts their pages as free, because it can drop and read them again, but a
model that lost its weights is no faster than the disk. So they count in full, from the load to the unload.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

MemoryBudget = int | Literal["auto", "unlimited"]
OnFull = Literal["refuse", "evict"]
DeviceKind = Literal["cpu", "gpu", "integrated gpu"]
CPU = "CPU"
ALL_DEVICES = "all devices"  # what a budget in bytes is for
MARGIN_SHARE = 0.05  # of a device's memory that "auto" leaves to other programs …
MAX_MARGIN_BYTES = 1 << 30  # … and at most these bytes
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Device:
    """A device with memory of its own, named as ggml names it: "CPU", "CUDA0" …"""

    name: str
    kind: DeviceKind
    description: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Vram:
    """The memory of all devices but the CPU together; what others use is among `used_bytes`."""

    total_bytes: int
    free_bytes: int
    used_bytes: int


def vram_of(devices: Iterable[Device]) -> Vram | None:
    """The sum of these devices' own memory; None, and no made-up number, if none of them has any."""
    own = [device for device in devices if device.kind != "cpu"]
    if not own:
        return None
    total, free = sum(device.total_bytes for device in own), sum(device.free_bytes for device in own)
    return Vram(total, free, total - free)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes that a model takes on one device. `mapped_bytes` of the weights lie in the page cache.

    `saved_bytes` are for KV states in RAM, those on their way to disk and from it included: they may be taken at any
    time, and so count in full.
    """

    weights_bytes: int = 0
    kv_bytes: int = 0  # cells, and the states of recurrent layers
    compute_bytes: int = 0  # scratch and output buffers
    mapped_bytes: int = 0
    saved_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Without `mapped_bytes`, which are a part of the weights."""
        return self.weights_bytes + self.kv_bytes + self.compute_bytes + self.saved_bytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a model takes, by device."""

    devices: Mapping[str, MemoryUse] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """On all devices together."""
        return self.on(ALL_DEVICES).total_bytes

    def on(self, device: str) -> MemoryUse:
        """What it takes of one device, or of ALL_DEVICES."""
        if device != ALL_DEVICES:
            return self.devices.get(device, MemoryUse())
        return _sum(self.devices.values())

    def plus(self, other: Footprint) -> Footprint:
        """What both take."""
        names = dict.fromkeys([*self.devices, *other.devices])
        return Footprint({name: _sum([self.on(name), other.on(name)]) for name in names})

    def by_device(self) -> dict[str, int]:
        """Bytes per device."""
        return {name: usage.total_bytes for name, usage in self.devices.items()}


def _sum(parts: Collection[MemoryUse]) -> MemoryUse:
    return MemoryUse(**{name: sum(getattr(usage, name) for usage in parts) for name in MemoryUse.__slots__})


@dataclass(frozen=True, slots=True)
class Shortage:
    """Where a footprint does not fit."""

    device: str
    required_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that may still be taken: of each device, or of all together under the name ALL_DEVICES."""

    free: Mapping[str, int]

    def needed(self, footprint: Footprint) -> dict[str, int]:
        """What a footprint takes, under the names that this room has; a device that it does not know is left out."""
        if ALL_DEVICES in self.free:
            return {ALL_DEVICES: footprint.total_bytes}
        return {name: size for name, size in footprint.by_device().items() if name in self.free}

    def shortage(self, footprint: Footprint) -> Shortage | None:
        """The device where most is missing, None if the footprint fits."""
        lacking = [
            Shortage(name, size, max(0, self.free[name]))
            for name, size in self.needed(footprint).items()
            if size > self.free[name]
        ]
        return max(lacking, key=lambda shortage: shortage.required_bytes - shortage.available_bytes, default=None)

    def beside(self, footprint: Footprint) -> Room:
        """The room that this leaves."""
        taken = self.needed(footprint)
        return Room({name: size - taken.get(name, 0) for name, size in self.free.items()})

    def with_back(self, footprints: Iterable[Footprint]) -> Room:
        """The room after these have gone."""
        free = dict(self.free)
        for footprint in footprints:
            for name, size in self.needed(footprint).items():
                free[name] += size
        return Room(free)


def margin(device: Device) -> int:
    """Bytes of a device that "auto" leaves to others."""
    return min(MAX_MARGIN_BYTES, int(device.total_bytes * MARGIN_SHARE))


class Budget:
    """Who has taken what, and what is left. Safe from any thread; no call waits."""

    def __init__(
        self,
        limit: MemoryBudget,
        devices: Callable[[], Sequence[Device]],
        num_saved: Callable[[str], int] = lambda model_id: 0,
    ) -> None:
        """`num_saved` tells how many bytes of its quota a model's saved states take just now."""
        self.limit = limit
        self._devices = devices
        self._num_saved = num_saved
        self._taken: dict[str, Footprint] = {}
        self._in_flight: set[str] = set()
        # While loads are in flight, what the devices report falls, sooner or later, by what they take. It is known
        # what they will take: so it is subtracted from what was free before the first of them.
        self._before: dict[str, int] = {}
        self._lock = threading.Lock()

    def reserve(self, model_id: str, footprint: Footprint) -> None:
        """Counts a model from now on; it is in flight until `settle`."""
        with self._lock:
            if not self._in_flight:
                self._before = self._measured()
            for name, size in footprint.by_device().items():
                self._before[name] = self._before.get(name, 0) - size
            self._taken[model_id] = footprint
            self._in_flight.add(model_id)

    def settle(self, model_id: str, footprint: Footprint) -> None:
        """A load is over; what it really took counts."""
        with self._lock:
            self._taken[model_id] = footprint
            self._in_flight.discard(model_id)

    def release(self, model_id: str) -> None:
        """A model is gone, or could not be loaded."""
        with self._lock:
            footprint = self._taken.pop(model_id, Footprint())
            self._in_flight.discard(model_id)
            for name, size in footprint.by_device().items():
                self._before[name] = self._before.get(name, 0) + size

    def taken(self) -> dict[str, Footprint]:
        """All models and what they count for."""
        with self._lock:
            return dict(self._taken)

    def room(self) -> Room:
        """What the budget leaves. "unlimited" leaves what "auto" does: the sizes that were left open go by it."""
        with self._lock:
            if isinstance(self.limit, int):
                return Room({ALL_DEVICES: self.limit - sum(taken.total_bytes for taken in self._taken.values())})
            free = self._measured()
            if self._in_flight:
                free = {name: min(size, self._before.get(name, size)) for name, size in free.items()}
            return Room(free)

    def _measured(self) -> dict[str, int]:
        free = {device.name: device.free_bytes - margin(device) for device in self._devices()}
        for model_id in self._taken.keys() - self._in_flight:
            for name, usage in self._taken[model_id].devices.items():
                if name in free:
                    free[name] -= usage.mapped_bytes
                    if usage.saved_bytes:
                        free[name] -= max(0, usage.saved_bytes - self._num_saved(model_id))
        return free


def choose_victims(room: Room, footprint: Footprint, idle: Sequence[tuple[str, Footprint]]) -> list[str]:
    """Return the first models of `idle`, as few as will do, without which a footprint fits; [] if all are too few."""
    for count in range(1, len(idle) + 1):
        if room.with_back(taken for _, taken in idle[:count]).shortage(footprint) is None:
            return [model_id for model_id, _ in idle[:count]]
    return []


def readable(num_bytes: float) -> str:
    """A size for people: "1.5 GiB"."""
    size, unit = float(num_bytes), 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 or abs(size) >= 100 else f"{size:.1f} {_UNITS[unit]}"
