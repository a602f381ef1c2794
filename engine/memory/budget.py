"""The memory budget: how much memory models need, and how much memory the devices have.

The calculations in this module require neither models nor devices. With "auto", the available memory is the devices'
free memory, minus a margin and the memory needed by loads in progress. Mapped weights are a special case. The operating
system counts the pages of mapped weights as free, because it can drop and reread these pages. However, a model whose
weights are not in memory is only as fast as the disk. Mapped weights therefore count in full while the model is loaded.
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
ALL_DEVICES = "all devices"  # the name under which a budget in bytes is kept
MARGIN_SHARE = 0.05  # share of a device's memory that "auto" leaves to other programs
MAX_MARGIN_BYTES = 1 << 30  # upper limit of this margin
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Device:
    """A device with its own memory. The device's name comes from ggml, such as "CPU" or "CUDA0"."""

    name: str
    kind: DeviceKind
    description: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Vram:
    """The combined memory of all devices except the CPU. `used_bytes` includes the memory used by other programs."""

    total_bytes: int
    free_bytes: int
    used_bytes: int


def vram_of(devices: Iterable[Device]) -> Vram | None:
    """Return the total memory of all GPUs among these devices, or None if there are no GPUs."""
    gpus = [device for device in devices if device.kind != "cpu"]
    if not gpus:
        return None
    total, free = sum(device.total_bytes for device in gpus), sum(device.free_bytes for device in gpus)
    return Vram(total, free, total - free)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory that a model uses on one device, in bytes.

    `mapped_bytes` is the part of the weights that is in the page cache. `saved_bytes` is the space for KV states in
    RAM, including states that are being read from or written to disk. This space counts in full, because it may be used
    at any time.
    """

    weights_bytes: int = 0
    kv_bytes: int = 0  # cells, and states of recurrent layers
    compute_bytes: int = 0  # scratch and output buffers
    mapped_bytes: int = 0
    saved_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The total memory in bytes. `mapped_bytes` is not added, because mapped memory is part of the weights."""
        return self.weights_bytes + self.kv_bytes + self.compute_bytes + self.saved_bytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory that a model uses on each device."""

    devices: Mapping[str, MemoryUse] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """The total memory on all devices, in bytes."""
        return self.on(ALL_DEVICES).total_bytes

    def on(self, device: str) -> MemoryUse:
        """Return the memory use on one device, or on all devices for ALL_DEVICES."""
        if device != ALL_DEVICES:
            return self.devices.get(device, MemoryUse())
        return _sum(self.devices.values())

    def plus(self, other: Footprint) -> Footprint:
        """Return the sum of two footprints."""
        names = dict.fromkeys([*self.devices, *other.devices])
        return Footprint({name: _sum([self.on(name), other.on(name)]) for name in names})

    def by_device(self) -> dict[str, int]:
        """Return the total memory that is required on each device, in bytes."""
        return {name: usage.total_bytes for name, usage in self.devices.items()}


def _sum(parts: Collection[MemoryUse]) -> MemoryUse:
    return MemoryUse(**{name: sum(getattr(usage, name) for usage in parts) for name in MemoryUse.__slots__})


@dataclass(frozen=True, slots=True)
class Shortage:
    """The device on which a footprint doesn't fit, with the required and available bytes."""

    device: str
    required_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """The number of bytes available on each device.

    A combined budget for all devices has the name ALL_DEVICES.
    """

    free: Mapping[str, int]

    def needed(self, footprint: Footprint) -> dict[str, int]:
        """Return the number of bytes that a footprint requires on each device in `free`. Other devices are omitted."""
        if ALL_DEVICES in self.free:
            return {ALL_DEVICES: footprint.total_bytes}
        return {name: size for name, size in footprint.by_device().items() if name in self.free}

    def shortage(self, footprint: Footprint) -> Shortage | None:
        """Return the device with the largest shortage, or None if the footprint fits."""
        shortages = [
            Shortage(name, size, max(0, self.free[name]))
            for name, size in self.needed(footprint).items()
            if size > self.free[name]
        ]
        return max(shortages, key=lambda shortage: shortage.required_bytes - shortage.available_bytes, default=None)

    def minus(self, footprint: Footprint) -> AvailableMemory:
        """Return the memory that would still be available after allocating this footprint."""
        needed = self.needed(footprint)
        return AvailableMemory({name: size - needed.get(name, 0) for name, size in self.free.items()})

    def plus(self, footprints: Iterable[Footprint]) -> AvailableMemory:
        """Return the memory that would be available after freeing these footprints."""
        free = dict(self.free)
        for footprint in footprints:
            for name, size in self.needed(footprint).items():
                free[name] += size
        return AvailableMemory(free)


def margin(device: Device) -> int:
    """Return the number of bytes on a device that "auto" leaves free for other programs."""
    return min(MAX_MARGIN_BYTES, int(device.total_bytes * MARGIN_SHARE))


class Budget:
    """The memory reserved for each model, and the available memory.

    This class is thread-safe, and its methods never block.
    """

    def __init__(
        self,
        limit: MemoryBudget,
        devices: Callable[[], Sequence[Device]],
        num_saved: Callable[[str], int] = lambda model_id: 0,
    ) -> None:
        """Create a budget.

        `num_saved` returns the number of bytes that a model's saved states currently use.
        """
        self.limit = limit
        self._devices = devices
        self._num_saved = num_saved
        self._taken: dict[str, Footprint] = {}
        self._in_flight: set[str] = set()
        # During a load, the free memory that a device reports falls sooner or later. The loads' needs are known, so
        # they are subtracted from the free memory that was reported before the first of them.
        self._before: dict[str, int] = {}
        self._lock = threading.Lock()

    def reserve(self, model_id: str, footprint: Footprint) -> None:
        """Reserve memory for a model. The model's load counts as in progress until `settle` is called."""
        with self._lock:
            if not self._in_flight:
                self._before = self._measured()
            for name, size in footprint.by_device().items():
                self._before[name] = self._before.get(name, 0) - size
            self._taken[model_id] = footprint
            self._in_flight.add(model_id)

    def settle(self, model_id: str, footprint: Footprint) -> None:
        """Mark a load as finished, and replace the planned footprint with the model's actual footprint."""
        with self._lock:
            self._taken[model_id] = footprint
            self._in_flight.discard(model_id)

    def release(self, model_id: str) -> None:
        """Release the memory of a model that has been unloaded or has failed to load."""
        with self._lock:
            footprint = self._taken.pop(model_id, Footprint())
            self._in_flight.discard(model_id)
            for name, size in footprint.by_device().items():
                self._before[name] = self._before.get(name, 0) + size

    def taken(self) -> dict[str, Footprint]:
        """Return the footprints of all models."""
        with self._lock:
            return dict(self._taken)

    def available(self) -> AvailableMemory:
        """Return the available memory.

        With "unlimited", the memory is measured as with "auto", because the chosen context and quota depend on the
        result.
        """
        with self._lock:
            if isinstance(self.limit, int):
                remaining = self.limit - sum(taken.total_bytes for taken in self._taken.values())
                return AvailableMemory({ALL_DEVICES: remaining})
            free = self._measured()
            if self._in_flight:
                free = {name: min(size, self._before.get(name, size)) for name, size in free.items()}
            return AvailableMemory(free)

    def _settled(self) -> Iterable[str]:
        return self._taken.keys() - self._in_flight

    def _measured(self) -> dict[str, int]:
        free = {}
        for device in self._devices():
            # RPC servers that compute on a CPU report all of its memory as free, even after loads.
            uses = [self._taken[model_id].on(device.name) for model_id in self._settled()]
            taken = sum(use.total_bytes - use.mapped_bytes - use.saved_bytes for use in uses)
            free[device.name] = min(device.free_bytes, device.total_bytes - taken) - margin(device)
        for model_id in self._settled():
            for name, usage in self._taken[model_id].devices.items():
                if name in free:
                    free[name] -= usage.mapped_bytes
                    if usage.saved_bytes:
                        free[name] -= max(0, usage.saved_bytes - self._num_saved(model_id))
        return free


def choose_victims(
    available: AvailableMemory, footprint: Footprint, idle: Sequence[tuple[str, Footprint]]
) -> list[str]:
    """Return the ids of the idle models to unload so that a footprint fits.

    Models are taken from the start of `idle`, until enough memory is free. If unloading all idle models would not free
    enough memory, return an empty list.
    """
    for count in range(1, len(idle) + 1):
        if available.plus(taken for _, taken in idle[:count]).shortage(footprint) is None:
            return [model_id for model_id, _ in idle[:count]]
    return []


def readable(num_bytes: float) -> str:
    """Return a size in human-readable form, such as "1.5 GiB"."""
    size, unit = float(num_bytes), 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 or abs(size) >= 100 else f"{size:.1f} {_UNITS[unit]}"
