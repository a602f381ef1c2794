"""The desired state of a worker: the models in its settings, and the changes that commands made at run time.

Redis stores two records of these changes: one for the worker's pool, and one for the worker alone. Each record is a
hash whose keys identify a model, an adapter of a model, or the default model. A value contains the required settings,
or a note that the model, adapter or default must be absent. An entry for the worker overrides the entry for its pool,
which overrides the settings. The functions are pure, and only `DesiredStateRecord` reads and writes Redis.
docs/adr/012-pools.md explains the reasons.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from redis import Redis
from redis.exceptions import RedisError

from cellama.config import ModelSettings, Settings
from cellama.config.logging import event_logger
from cellama.config.settings import AdapterSettings
from cellama.engine import ModelLoadFailed
from cellama.tasks.connection.connections import redis_time, seconds_of
from cellama.tasks.contract.keys import desired_state_key, trials_key
from cellama.tasks.contract.names import failure_key
from cellama.tasks.state.scripts import run_script

log = event_logger(__name__)

Key = tuple[str, ...]  # ("model", id), ("adapter", id of its model, name) or ("default",)
Origin = Literal["settings", "pool", "worker"]
DEFAULT_KEY: Key = ("default",)
NUM_PARTS = {"model": 2, "adapter": 3, "default": 1}  # length of the keys of each kind
# Seconds to keep the record of a pool without workers, or a note that something is absent. Machines are rarely switched
# off for longer.
RECORD_TTL_S = 30 * 86400
RESIDENCY_FIELDS = ("on_demand", "keep_alive_s", "preload", "pinned")  # settings that don't change the loaded model
MAX_CRASHED_LOADS = 3  # consecutive loads that crash the process; one crash may have another cause, such as low memory
CRASHED_LOADS_TTL_S = 86400  # then the load is retried, because the file or the machine may have changed


def model_key(model_id: str) -> Key:
    return ("model", model_id)


def adapter_key(model_id: str, name: str) -> Key:
    return ("adapter", model_id, name)


def key_text(key: Key) -> str:
    """Return the name under which a worker reports the failures of actions for a key."""
    return failure_key(*key[1:]) if len(key) > 1 else key[0]


def field_of(key: Key) -> bytes:
    """Return the name of the Redis field that stores a key's entry."""
    return json.dumps(key, separators=(",", ":")).encode()


def key_of(name: bytes) -> Key:
    """Parse the name of a Redis field into a key. Raises ValueError if the name is not a valid key."""
    parts = json.loads(name)
    if not (isinstance(parts, list) and all(isinstance(part, str) for part in parts)):
        raise ValueError("the key is not a list of strings")
    key = tuple(parts)
    if NUM_PARTS.get(key[0] if key else "") != len(key) or field_of(key) != name:
        raise ValueError("the key does not name a model, an adapter or the default model")
    return key


class Override(BaseModel):
    """The entry for a key, which sets exactly one of `model`, `adapter`, `default` and `gone`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: float = Field(default=0.0, allow_inf_nan=False)  # unix time in seconds, by Redis' clock
    gone: bool = False  # whether the model or the adapter must be absent
    model: ModelSettings | None = None
    adapter: AdapterSettings | None = None
    default: str | None = None

    def text(self) -> str:
        """Return the entry as JSON, without the model's `hub_token`, because the file is already in the hub's cache."""
        fields = self.model_dump(mode="json", exclude={"model"}, exclude_defaults=True)
        if self.model is not None:
            fields["model"] = self.model.model_dump(mode="json", exclude={"hub_token", "default"}, exclude_unset=True)
        return json.dumps(fields, sort_keys=True)


def override_of(key: Key, text: bytes | str) -> Override:
    """Parse the entry for a key from JSON. Raises ValueError."""
    override = Override.model_validate_json(text)
    given = [kind for kind in NUM_PARTS if getattr(override, kind) is not None]
    if given != ([] if override.gone else [key[0]]):
        raise ValueError(f"the entry must set either `{key[0]}` or `gone`")
    if override.model is not None and override.model.id != key[1]:
        raise ValueError(f"the entry belongs to another model, {override.model.id!r}")
    return override


Overrides = Mapping[Key, tuple[Override, Origin]]  # the entries that apply to a worker


def override_in(overrides: Overrides, key: Key) -> Override | None:
    return overrides[key][0] if key in overrides else None


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The models and adapters that a worker must have."""

    models: Mapping[str, ModelSettings]  # by id, with all their adapters
    adapters: Mapping[Key, AdapterSettings]
    origins: Mapping[Key, Origin]  # the settings or the record that desire each model and adapter
    default: str | None  # id of the default model; None leaves the choice to the manager


def desired_state(settings: Settings, overrides: Overrides) -> DesiredState:
    """Apply overrides to the desired state in a worker's settings."""
    models = {model.id: model for model in settings.models}
    origins: dict[Key, Origin] = {model_key(model_id): "settings" for model_id in models}
    for key, (override, origin) in overrides.items():
        if override.model is not None:
            models[key[1]], origins[key] = override.model, origin
        elif key[0] == "model":
            models.pop(key[1], None)
    adapters: dict[Key, AdapterSettings] = {}
    for model_id, model in models.items():
        for name, adapter in model.adapters.items():
            key = adapter_key(model_id, name)
            adapters[key], origins[key] = adapter, origins[model_key(model_id)]
    for key, (override, origin) in overrides.items():
        if override.adapter is not None and key[1] in models:
            adapters[key], origins[key] = override.adapter, origin
        elif key[0] == "adapter":
            adapters.pop(key, None)
    for model_id, model in models.items():
        complete = {key[2]: adapter for key, adapter in adapters.items() if key[1] == model_id}
        models[model_id] = model.model_copy(update={"adapters": complete})
    chosen = override_in(overrides, DEFAULT_KEY)
    default = chosen.default if chosen is not None and chosen.default in models else None
    return DesiredState(models=models, adapters=adapters, origins=origins, default=default)


@dataclass(frozen=True, slots=True)
class Correction:
    """One action that brings a worker closer to its desired state."""

    action: Literal["load", "unload", "scale"]
    key: Key


def corrections(
    desired: DesiredState, models: Mapping[str, ModelSettings], adapters: Mapping[Key, AdapterSettings]
) -> Iterator[Correction]:
    """Yield the actions that a worker with these models and adapters needs, starting with actions that free memory.

    The adapters in `models` are ignored, because `adapters` contains the current adapters.
    """
    for model_id, model in models.items():
        if model_id not in desired.models or not loads_the_same(desired.models[model_id], model, adapters=False):
            yield Correction("unload", model_key(model_id))
    for key, adapter in adapters.items():
        if key[1] not in desired.models:
            continue  # the adapter is unloaded with its model
        if key not in desired.adapters or desired.adapters[key].source != adapter.source:
            yield Correction("unload", key)
        elif desired.adapters[key].scale != adapter.scale:
            yield Correction("scale", key)
    for model_id, model in desired.models.items():
        if model_id not in models and not model.on_demand:  # OnDemandModels loads the others (on_demand.py)
            yield Correction("load", model_key(model_id))
    for key in desired.adapters:
        if key[1] in models and key not in adapters:
            yield Correction("load", key)


def loads_the_same(one: ModelSettings, other: ModelSettings, *, adapters: bool = True) -> bool:
    """Return whether two models' settings load the same model and, if `adapters` is true, also the same adapters."""
    ignored = {"id", "default", "hub_token", *RESIDENCY_FIELDS, *(() if adapters else ("adapters",))}
    return one.model_dump(exclude=ignored) == other.model_dump(exclude=ignored)


class DesiredStateRecord:
    """The records of a worker and of its pool in Redis. Any thread may call its methods, which raise RedisError."""

    def __init__(self, redis: Redis, pool: str, worker: str) -> None:
        self._redis = redis
        self._pool, self._worker = desired_state_key("pool", pool), desired_state_key("worker", worker)
        self._loads = trials_key(worker)
        self._fields: dict[str, dict[bytes, bytes]] = {self._pool: {}, self._worker: {}}  # as read last
        self._logged: set[bytes] = set()  # unreadable fields
        self._lock = threading.Lock()

    def read(self) -> Overrides:
        """Read both records, and remove old entries that require a model, adapter or default to be absent.

        If Redis has lost a whole record, restore the record from the last read.
        """
        with self._lock:
            with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.time()
                for record in (self._pool, self._worker):
                    pipeline.hgetall(record)
                    pipeline.expire(record, RECORD_TTL_S)
                time, of_pool, _, of_worker, _ = pipeline.execute()
            overrides: dict[Key, tuple[Override, Origin]] = {}
            records: list[tuple[str, dict[bytes, bytes], Origin]]
            records = [(self._pool, of_pool, "pool"), (self._worker, of_worker, "worker")]
            for record, found, origin in records:
                self._fields[record] = fields = self._restored(record, found)
                for name, text in list(fields.items()):
                    try:
                        key = key_of(name)
                        override = override_of(key, text)
                    except (ValueError, RecursionError) as error:  # written by another version, for example
                        self._log_once(record, name, error)
                        continue
                    if override.gone and seconds_of(time) - override.at > RECORD_TTL_S:
                        self._redis.hdel(record, name)
                        del fields[name]
                    else:
                        overrides[key] = (override, origin)
            return overrides

    def _restored(self, record: str, found: dict[bytes, bytes]) -> dict[bytes, bytes]:
        known = self._fields[record]
        if found or not known:
            return found
        log.warning("desired state restored", record=record, num_entries=len(known), detail="Redis had lost the record")
        self._redis.hset(record, mapping=known)  # type: ignore[arg-type]
        return dict(known)

    def _log_once(self, record: str, name: bytes, error: Exception) -> None:
        if name not in self._logged:
            self._logged.add(name)
            log.error("invalid desired state entry ignored", record=record, field=name[:80], detail=error)

    def text_of(self, key: Key, *, whole_pool: bool) -> bytes:
        """Return the JSON that an entry had at the last read, or b"" if there was no entry."""
        return self._fields[self._pool if whole_pool else self._worker].get(field_of(key), b"")

    def write(self, key: Key, override: Override, *, whole_pool: bool, before: bytes | None = None) -> None:
        """Write an entry for the pool or for this worker.

        If `before` is given, nothing is written unless the stored entry is still `before`, which `text_of` returned. An
        entry for the pool replaces the entry for this worker. If a model must be absent, the entries of its adapters
        are removed.
        """
        name = field_of(key)
        text = override.model_copy(update={"at": redis_time(self._redis)}).text()
        record = self._pool if whole_pool else self._worker
        if before is None:
            self._redis.hset(record, mapping={name: text})
        elif not run_script(self._redis, "replace_field", [record], [name, before, text]):
            return
        if whole_pool:
            self._remove(self._worker, [name])
        if override.gone and key[0] == "model":
            for each in {record, self._worker}:
                self._remove(each, [field for field in self._fields[each] if _is_adapter_of(key[1], field)])

    def _remove(self, record: str, names: list[bytes]) -> None:
        with self._lock:
            if names := [name for name in names if name in self._fields[record]]:
                self._redis.hdel(record, *names)
                for name in names:
                    del self._fields[record][name]

    # Loads that crash the process

    def start_load(self, key: Key) -> None:
        """Record that a load is about to start. Raises ModelLoadFailed if the most recent loads crashed the process."""
        num_loads: Any = self._redis.hincrby(self._loads, field_of(key), 1)
        if num_loads > MAX_CRASHED_LOADS:
            raise ModelLoadFailed(
                f"the last {MAX_CRASHED_LOADS} loads crashed the worker, so the next attempt will be made in a day; "
                "check the workers' logs, or load the model with a command to retry now"
            )
        self._redis.expire(self._loads, CRASHED_LOADS_TTL_S)

    def end_load(self, key: Key | None) -> None:
        """Record that a load has succeeded or failed. If `key` is None, do so for all of the worker's loads.

        Never raises.
        """
        try:
            if key is None:
                self._redis.delete(self._loads)
            else:
                self._redis.hdel(self._loads, field_of(key))
        except RedisError as error:
            log.warning("finished model load not recorded", detail=f"{error}; the load counts as a crash")


def _is_adapter_of(model_id: str, name: bytes) -> bool:
    try:
        return key_of(name)[:2] == ("adapter", model_id)
    except (ValueError, RecursionError):
        return False
