"""A model's LoRA adapters, their scales, and the number of requests that use each adapter.

This module is thread-safe.

The states of an adapter:

(nothing) ── load ──► loading ──► ready ── unload ──► unloading ──► (nothing)
                         │                                │
                         └── failed → (nothing)           └── still in use at the timeout → ready
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cellama.engine.backend import Adapter, AdapterSet, AdapterStore, AdapterUse
from cellama.engine.errors import AdapterBusy, IdTaken, UnknownAdapter, nearest
from cellama.engine.request import Request

UNLOAD_TIMEOUT_S = 30.0  # seconds to wait for requests that use the adapter; the same as for models (models/manager.py)
AdapterStatus = Literal["loading", "ready", "unloading"]


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """The public description of an adapter."""

    name: str
    source: str
    status: AdapterStatus
    scale: float  # default scale; 0 if only requests that choose the adapter use it
    fingerprint: str  # SHA-256 of the file; "" while it is loading
    size_bytes: int
    in_use: int  # number of unfinished requests that use it


@dataclass(slots=True)
class _Entry:
    source: str
    scale: float
    status: AdapterStatus = "loading"
    adapter: Adapter | None = None
    size_bytes: int = 0


class Adapters:
    """A model's adapters, keyed by name.

    A request acquires its adapters when it is submitted, and releases them when it ends.
    """

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._entries: dict[str, _Entry] = {}
        self._users: Counter[Adapter] = Counter()
        self._default: AdapterSet = ()
        self._unloaded: set[str] = set()  # names of earlier adapters: unloading them again is not an error
        self._changed = threading.Condition()

    def load(self, name: str, source: str, path: Path, scale: float = 1.0) -> AdapterInfo:
        """Load an adapter from a file, and return its description.

        Once the adapter is loaded, requests that don't choose any adapters use it at this scale. Other requests
        continue while the adapter is loading. If loading fails, the adapter is removed from memory. Raises IdTaken,
        InvalidRequest and AdapterLoadFailed.
        """
        with self._changed:
            self.check_new(name, scale)
            entry = self._entries[name] = _Entry(source, scale)
        try:
            with path.open("rb") as file:
                fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
            adapter = Adapter(name, fingerprint, self._store.load_adapter(path))
        except BaseException:
            with self._changed:
                del self._entries[name]
            raise
        with self._changed:
            entry.adapter, entry.status, entry.size_bytes = adapter, "ready", path.stat().st_size
            self._unloaded.discard(name)
            self._update_default()
            return self._info(name, entry)

    def check_new(self, name: str, scale: float) -> None:
        """Raise IdTaken or InvalidRequest if `load` would reject this name or scale now."""
        _check_name_and_scale(name, scale)
        with self._changed:
            if name in self._entries:
                raise IdTaken(f"adapter {name!r} already exists; choose another name, or unload it first")

    def check_unload(self, name: str) -> None:
        """Raise UnknownAdapter if `unload` would not find an adapter with this name now."""
        with self._changed:
            if name not in self._unloaded or name in self._entries:
                self._ready(name)

    def check_scale(self, name: str, scale: float) -> None:
        """Raise UnknownAdapter or InvalidRequest if `set_scale` would reject this name or scale now."""
        _check_name_and_scale(name, scale)
        with self._changed:
            self._ready(name)

    def set_scale(self, name: str, scale: float) -> None:
        """Set the adapter's scale for later requests that don't choose any adapters.

        A scale of 0 disables the adapter for these requests. Running requests keep the previous scale. Raises
        UnknownAdapter and InvalidRequest.
        """
        _check_name_and_scale(name, scale)
        with self._changed:
            self._ready(name)
            self._entries[name].scale = scale
            self._update_default()

    def unload(self, name: str, timeout_s: float = UNLOAD_TIMEOUT_S) -> None:
        """Free an adapter after the last request that uses it has finished.

        In the meantime, the adapter is not assigned to new requests. Unloading an adapter twice is not an error. Raises
        UnknownAdapter if an adapter with this name has never been loaded. Raises AdapterBusy if the adapter is still in
        use after `timeout_s`. In this case, the adapter becomes available again.
        """
        with self._changed:
            if name in self._unloaded and name not in self._entries:
                return
            adapter, entry = self._ready(name), self._entries[name]
            entry.status = "unloading"
            self._update_default()
            if not self._changed.wait_for(lambda: not self._users[adapter], timeout_s):
                entry.status = "ready"
                self._update_default()
                raise AdapterBusy(
                    f"adapter {name!r} is still in use by {self._users[adapter]} request(s) after {timeout_s:g} s and "
                    "stays loaded; cancel these requests, or allow more time"
                )
            del self._entries[name], self._users[adapter]
            self._unloaded.add(name)
        self._store.free_adapter(adapter.handle)

    def infos(self) -> list[AdapterInfo]:
        """Return descriptions of all adapters, including adapters that are loading or unloading."""
        with self._changed:
            return [self._info(name, entry) for name, entry in self._entries.items()]

    # Requests

    def acquire(self, choice: Iterable[tuple[str, float]] | None) -> AdapterSet:
        """Return the adapters in `choice`, or the default adapters if `choice` is None.

        The adapters stay loaded until `release` is called. Raises UnknownAdapter.
        """
        if choice is None and not self._default:
            return ()
        with self._changed:
            chosen = self._default if choice is None else _in_order((self._ready(n), scale) for n, scale in choice)
            self._users.update(use.adapter for use in chosen)
            return chosen

    def release(self, adapters: AdapterSet) -> None:
        """Release the adapters of a finished request."""
        if adapters:
            with self._changed:
                self._users.subtract(use.adapter for use in adapters)
                self._changed.notify_all()

    # With the lock

    # With the lock held

    def _ready(self, name: str) -> Adapter:
        entry = self._entries.get(name)
        if entry is not None and entry.adapter is not None and entry.status == "ready":
            return entry.adapter
        if entry is not None:
            raise UnknownAdapter(f"adapter {name!r} is {entry.status}; retry when it has finished {entry.status}")
        raise UnknownAdapter(f"adapter {name!r} is not loaded for this model; {nearest(name, self._entries)}")

    def _update_default(self) -> None:
        ready = [entry for entry in self._entries.values() if entry.status == "ready"]
        self._default = _in_order((entry.adapter, entry.scale) for entry in ready if entry.adapter is not None)

    def _info(self, name: str, entry: _Entry) -> AdapterInfo:
        adapter = entry.adapter
        fingerprint, in_use = ("", 0) if adapter is None else (adapter.fingerprint, self._users[adapter])
        return AdapterInfo(
            name=name,
            source=entry.source,
            status=entry.status,
            scale=entry.scale,
            fingerprint=fingerprint,
            size_bytes=entry.size_bytes,
            in_use=in_use,
        )


def _in_order(chosen: Iterable[tuple[Adapter, float]]) -> AdapterSet:
    uses = [AdapterUse(adapter, float(scale)) for adapter, scale in chosen if scale]
    return tuple(sorted(uses, key=lambda use: (use.adapter.fingerprint, use.adapter.name)))


def _check_name_and_scale(name: str, scale: float) -> None:
    """Raise InvalidRequest if the name or the scale is not valid in requests."""
    Request("", (0,), adapters=((name, scale),))
