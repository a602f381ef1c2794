"""The LoRA adapters of one model: which are there, at which scales, and who uses them. Safe from any thread.

(nothing) ── load ──► loading ──► ready ── unload ──► unloading ──► (nothing)
                         │                                │
                         └── failed: (nothing)            └── still in use at the timeout: ready again
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

UNLOAD_TIMEOUT_S = 30.0  # seconds for the requests that have the adapter to end; as for a model (models/manager.py)
AdapterStatus = Literal["loading", "ready", "unloading"]


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter as callers see it."""

    name: str
    source: str
    status: AdapterStatus
    scale: float  # for requests that do not choose; 0 = only for those that do
    fingerprint: str  # SHA-256 of the file; "" while it is loading
    size_bytes: int
    in_use: int  # unfinished requests


@dataclass(slots=True)
class _Entry:
    source: str
    scale: float
    status: AdapterStatus = "loading"
    adapter: Adapter | None = None
    size_bytes: int = 0


class Adapters:
    """Adapters by name. A request takes a set of them when it is submitted, and gives it back at its end."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._entries: dict[str, _Entry] = {}
        self._users: Counter[Adapter] = Counter()
        self._default: AdapterSet = ()
        self._unloaded: set[str] = set()  # names that were here; unloading them again is no mistake
        self._changed = threading.Condition()

    def load(self, name: str, source: str, path: Path, scale: float = 1.0) -> AdapterInfo:
        """Reads an adapter's file; from then on requests that do not choose have it with this scale.

        Other requests go on meanwhile. Raises IdTaken, InvalidRequest, AdapterLoadFailed; nothing is left then.
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
            self._renew_default()
            return self._info(name, entry)

    def check_new(self, name: str, scale: float) -> None:
        """Raises IdTaken or InvalidRequest as `load` would now."""
        _check_name_and_scale(name, scale)
        with self._changed:
            if name in self._entries:
                raise IdTaken(f"there is an adapter {name!r} already; choose another name, or unload it first")

    def check_unload(self, name: str) -> None:
        """Raises UnknownAdapter as `unload` would now."""
        with self._changed:
            if name not in self._unloaded or name in self._entries:
                self._ready(name)

    def check_scale(self, name: str, scale: float) -> None:
        """Raises UnknownAdapter or InvalidRequest as `set_scale` would now."""
        _check_name_and_scale(name, scale)
        with self._changed:
            self._ready(name)

    def set_scale(self, name: str, scale: float) -> None:
        """Requests that do not choose have the adapter with this scale from now on; 0 = they don't have it.

        Those that run keep what they have. Raises UnknownAdapter, InvalidRequest.
        """
        _check_name_and_scale(name, scale)
        with self._changed:
            self._ready(name)
            self._entries[name].scale = scale
            self._renew_default()

    def unload(self, name: str, timeout_s: float = UNLOAD_TIMEOUT_S) -> None:
        """Gives an adapter to no more requests, waits until the last one that has it has ended, then frees it.

        One that was unloaded before is left alone. Raises UnknownAdapter for one that never was here, and AdapterBusy
        if it is still in use after `timeout_s`: it serves again, then.
        """
        with self._changed:
            if name in self._unloaded and name not in self._entries:
                return
            adapter, entry = self._ready(name), self._entries[name]
            entry.status = "unloading"
            self._renew_default()
            if not self._changed.wait_for(lambda: not self._users[adapter], timeout_s):
                entry.status = "ready"
                self._renew_default()
                raise AdapterBusy(
                    f"adapter {name!r} is still in use by {self._users[adapter]} request(s) after {timeout_s:g} s; "
                    "it stays loaded and serves again: cancel what runs, or allow more time"
                )
            del self._entries[name], self._users[adapter]
            self._unloaded.add(name)
        self._store.free_adapter(adapter.handle)

    def infos(self) -> list[AdapterInfo]:
        """All adapters, those that are on their way, too."""
        with self._changed:
            return [self._info(name, entry) for name, entry in self._entries.items()]

    # For requests

    def take(self, choice: Iterable[tuple[str, float]] | None) -> AdapterSet:
        """The adapters that a request asks for, or those of requests that do not choose (None).

        They stay until `give_back`. Raises UnknownAdapter.
        """
        if choice is None and not self._default:
            return ()
        with self._changed:
            taken = self._default if choice is None else _in_order((self._ready(n), scale) for n, scale in choice)
            self._users.update(use.adapter for use in taken)
            return taken

    def give_back(self, adapters: AdapterSet) -> None:
        """The end of a request that had taken these."""
        if adapters:
            with self._changed:
                self._users.subtract(use.adapter for use in adapters)
                self._changed.notify_all()

    # With the lock held

    def _ready(self, name: str) -> Adapter:
        entry = self._entries.get(name)
        if entry is not None and entry.adapter is not None and entry.status == "ready":
            return entry.adapter
        if entry is not None:
            raise UnknownAdapter(f"adapter {name!r} is {entry.status}; wait until that is over")
        raise UnknownAdapter(f"no adapter {name!r} is loaded for this model; {nearest(name, self._entries)}")

    def _renew_default(self) -> None:
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
    """Raises InvalidRequest as a request with this choice would."""
    Request("", (0,), adapters=((name, scale),))
