"""What a worker shall have: its settings, changed by what was said at run time for its pool, and for it alone. Pure.

docs/adr/012-pools.md has the why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from cellama.config import ModelSettings, Settings
from cellama.config.settings import AdapterSettings
from cellama.tasks.contract.names import failure_key

Key = tuple[str, ...]  # ("model", id), ("adapter", id of its model, name), ("default",)
By = Literal["settings", "pool", "worker"]
DEFAULT_KEY: Key = ("default",)
_PARTS = {"model": 2, "adapter": 3, "default": 1}
_APART = {"id", "default", "hub_token"}  # what makes no other model of it


def model_key(model_id: str) -> Key:
    return ("model", model_id)


def adapter_key(model_id: str, name: str) -> Key:
    return ("adapter", model_id, name)


def key_text(key: Key) -> str:
    """What a worker's failures call it."""
    return failure_key(*key[1:]) if len(key) > 1 else key[0]


class Said(BaseModel):
    """What was said of a key: what it shall be, that it is gone, or nothing any more."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: float = Field(default=0.0, allow_inf_nan=False)  # unix seconds by Redis' clock
    gone: bool = False
    over: bool = False  # of a model: one of that id had been unloaded, so that it counts more than the settings
    model: ModelSettings | None = None
    adapter: AdapterSettings | None = None
    default: str | None = None

    @property
    def is_live(self) -> bool:
        return not (self.model is None and self.adapter is None and self.default is None)

    def text(self) -> str:
        """Without `at`, which the script puts in, and without tokens of the hub: the file is in its cache."""
        told = self.model_dump(mode="json", exclude={"at"}, exclude_defaults=True)
        if self.model is not None:
            told["model"] = self.model.model_dump(mode="json", exclude={"hub_token", "default"}, exclude_unset=True)
        return json.dumps(told, sort_keys=True)


def field_of(key: Key) -> str:
    """The field of a key in Redis."""
    return json.dumps(key, separators=(",", ":"))


def key_of(text: bytes) -> Key:
    """The key of a field in Redis. Raises ValueError; another spelling of a field is none: each key has one."""
    parts = json.loads(text)
    if not (isinstance(parts, list) and parts and all(isinstance(part, str) for part in parts)):
        raise ValueError("it is no list of texts")
    if _PARTS.get(parts[0]) != len(parts):
        raise ValueError(f"it is none of {', '.join(_PARTS)}")
    if field_of(tuple(parts)).encode() != text:
        raise ValueError(f"it is written otherwise: {field_of(tuple(parts))}")
    return tuple(parts)


def said_of(key: Key, text: bytes | str) -> Said:
    """What a value in Redis says of its key. Raises ValueError."""
    said = Said.model_validate_json(text)
    told = {"model": said.model, "adapter": said.adapter, "default": said.default}
    if (said.gone and said.is_live) or any(what is not None for kind, what in told.items() if kind != key[0]):
        raise ValueError(f"it says something else than what becomes of {key_text(key)}")
    if said.model is not None and said.model.id != key[1]:
        raise ValueError(f"it is of another model, {said.model.id!r}")
    return said


def is_same(one: ModelSettings, other: ModelSettings) -> bool:
    """True if both load the same, whatever they are called."""
    return one.model_dump(exclude=_APART) == other.model_dump(exclude=_APART)


@dataclass(frozen=True, slots=True)
class Spoken:
    """What was said, and the keys of which it can't be read, with the reason."""

    pool: Mapping[Key, Said] = field(default_factory=dict)
    own: Mapping[Key, Said] = field(default_factory=dict)
    unreadable: Mapping[Key, str] = field(default_factory=dict)

    def of(self, key: Key) -> tuple[Said | None, By]:
        """What counts of a key."""
        for said, by in ((self.own.get(key), "worker"), (self.pool.get(key), "pool")):
            if said is not None and (said.gone or said.is_live):
                return said, by  # type: ignore[return-value]
        return None, "settings"

    def keys(self, kind: str) -> Iterator[Key]:
        """Those of a kind, each once."""
        yield from dict.fromkeys(key for key in (*self.pool, *self.own) if key[0] == kind)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a worker shall have, and who says so. `clashes` are models that its settings have as something else."""

    models: Mapping[str, tuple[ModelSettings, By]]  # with all their adapters
    adapters: Mapping[Key, tuple[AdapterSettings, By]]
    default: str | None  # None: as it comes
    clashes: Mapping[str, tuple[ModelSettings, By]]


def wanted_by(settings: Settings, spoken: Spoken) -> Wanted:
    """What a worker with these settings shall have."""
    configured = {model.id: model for model in settings.models}
    models: dict[str, tuple[ModelSettings, By]] = {}
    adapters: dict[Key, tuple[AdapterSettings, By]] = {}
    clashes: dict[str, tuple[ModelSettings, By]] = {}
    for model_id in dict.fromkeys([*configured, *(key[1] for key in spoken.keys("model"))]):
        said, by = spoken.of(model_key(model_id))
        base = configured.get(model_id)
        if said is not None and said.gone:
            continue
        if base is not None and not (said and said.model and said.over):
            if said and said.model and not is_same(base, said.model):
                clashes[model_id] = (said.model, by)
            models[model_id] = (base, "settings")
        elif said is not None and said.model is not None:
            models[model_id] = (said.model, by)
    for model_id, (model, by) in models.items():
        own = dict(_adapters_of(model, by, spoken))
        adapters |= {adapter_key(model_id, name): chosen for name, chosen in own.items()}
        complete = {name: adapter for name, (adapter, _) in own.items()}
        if complete != model.adapters:
            models[model_id] = (model.model_copy(update={"adapters": complete}), by)
    said, _ = spoken.of(DEFAULT_KEY)
    return Wanted(models, adapters, said.default if said and said.default in models else None, clashes)


def _adapters_of(model: ModelSettings, by: By, spoken: Spoken) -> Iterator[tuple[str, tuple[AdapterSettings, By]]]:
    said_of_it = [key[2] for key in spoken.keys("adapter") if key[1] == model.id]
    for name in dict.fromkeys([*model.adapters, *said_of_it]):
        said, by_whom = spoken.of(adapter_key(model.id, name))
        if said is None and name in model.adapters:
            yield name, (model.adapters[name], by)
        elif said is not None and said.adapter is not None:
            yield name, (said.adapter, by_whom)


@dataclass(frozen=True, slots=True)
class Step:
    """What is to be done next about a key."""

    what: Literal["load", "unload", "scale"]
    key: Key


def steps(
    wanted: Wanted, models: Mapping[str, ModelSettings], adapters: Mapping[Key, AdapterSettings]
) -> Iterator[Step]:
    """What brings a worker with these models and adapters nearer to what it shall have; what must go, goes first.

    Of a model that is loaded, only what it was loaded as counts, and not the adapters that came later.
    """
    for model_id, model in models.items():
        if model_id not in wanted.models or not _is_like(wanted.models[model_id][0], model):
            yield Step("unload", model_key(model_id))
    for key, there in adapters.items():
        if key[1] not in wanted.models:
            continue  # it goes with its model
        if key not in wanted.adapters or wanted.adapters[key][0].source != there.source:
            yield Step("unload", key)
        elif wanted.adapters[key][0].scale != there.scale:
            yield Step("scale", key)
    for model_id in wanted.models:
        if model_id not in models:
            yield Step("load", model_key(model_id))
    for key in wanted.adapters:
        if key[1] in models and key not in adapters:
            yield Step("load", key)


def _is_like(one: ModelSettings, other: ModelSettings) -> bool:
    bare: dict[str, object] = {"adapters": {}}
    return is_same(one.model_copy(update=bare), other.model_copy(update=bare))
