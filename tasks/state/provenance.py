"""What the tokens of a job depend on besides its payload: the contents of its model and of its adapters and, for
constrained text, the version of llguidance.

The first attempt's `started` event has it. Every later attempt continues with the same, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.contract.events import ProvenanceFields, StartedEvent
from cellama.tasks.contract.names import DEFAULT_MODEL
from cellama.tasks.contract.shapes.workers import WorkerModel

from .registry import WorkerEntry

if TYPE_CHECKING:
    from cellama.engine import AdapterInfo, Model

Choice = tuple[tuple[str, float], ...]  # adapters by name, and their scales


@dataclass(frozen=True, slots=True)
class Provenance:
    """What an attempt computes with.

    `model` is the SHA-256 of the model. `adapters` have a name, a SHA-256 and a scale each; the scale 0 stands for an
    adapter that only some lines of a bulk run choose.
    """

    model: str
    adapters: tuple[tuple[str, str, float], ...] = ()
    sampling: Mapping[str, object] = field(default_factory=dict)  # the model's defaults
    llguidance: str | None = None  # version, of a constrained job; "" for older versions of cellama; None: any version

    def fields(self) -> ProvenanceFields:
        """Return the fields of the `started` event."""
        fields: ProvenanceFields = {"fingerprint": self.model}
        if self.adapters:
            fields["adapters"] = list(self.adapters)
        if self.sampling:
            fields["sampling"] = dict(self.sampling)
        if self.llguidance:
            fields["llguidance"] = self.llguidance
        return fields

    def is_in(self, model: Model) -> bool:
        """Return whether this is the model, and its adapters are loaded under their names."""
        return model.info.fingerprint == self.model and self._needs <= {(i.name, i.fingerprint) for i in _ready(model)}

    def is_served_by(self, entry: WorkerModel) -> bool:
        """Return the same for a model in a worker's entry in the registry."""
        there = {(adapter["name"], adapter["fingerprint"]) for adapter in entry.get("adapters", ())}
        return entry.get("fingerprint") == self.model and self._needs <= there

    @property
    def choice(self) -> Choice:
        """The adapters of a request that does not choose."""
        return tuple((name, scale) for name, _, scale in self.adapters if scale)

    @property
    def _needs(self) -> set[tuple[str, str]]:
        return {(name, fingerprint) for name, fingerprint, _ in self.adapters}


def provenance_of_event(event: StartedEvent) -> Provenance | None:
    """Return what a `started` event says; None for events of versions of cellama that did not write it."""
    adapters = tuple((name, fingerprint, scale) for name, fingerprint, scale in event.get("adapters", ()))
    if "fingerprint" not in event:
        return None
    return Provenance(event["fingerprint"], adapters, event.get("sampling", {}), event.get("llguidance"))


def provenance_of(model: Model, choice: Choice | None, also: Iterable[str] = ()) -> Provenance:
    """Return the provenance of a request with these adapters; None stands for those of requests that do not choose.

    An adapter that is not loaded is left out, because the engine refuses the request that names it. `also` are names
    of adapters that only some lines choose.
    """
    infos = _ready(model)
    chosen = ((info.name, info.scale) for info in infos) if choice is None else choice
    scales = {**dict.fromkeys(also, 0.0), **{name: scale for name, scale in chosen if scale}}
    adapters = tuple((i.name, i.fingerprint, float(scales[i.name])) for i in infos if i.name in scales)
    return Provenance(model.info.fingerprint, adapters, model.options.sampling_defaults)


def _ready(model: Model) -> list[AdapterInfo]:
    return [info for info in model.adapters() if info.status == "ready"]


def may_come(workers: Iterable[WorkerEntry], model_id: str, wanted: Provenance) -> bool:
    """Return whether one of these workers has (or had when it stopped) what the job needs, or loads what may be it."""
    entries = [e for worker in workers if wanted.llguidance in (None, worker.llguidance) for e in worker.models]
    served = [e for e in entries if e["id"] == model_id or (model_id == DEFAULT_MODEL and e["default"])]
    return any(entry["status"] == "loading" or wanted.is_served_by(entry) for entry in served)


def have_adapters(workers: Iterable[WorkerEntry], model_id: str, names: Iterable[str]) -> bool:
    """Return whether one of these workers has the model with all these adapters."""
    served = [
        e for w in workers for e in w.models if e["id"] == model_id or (model_id == DEFAULT_MODEL and e["default"])
    ]
    ready = [{adapter["name"] for adapter in e.get("adapters", ()) if adapter["status"] == "ready"} for e in served]
    return any(set(names) <= there for there in ready)


def changed(model_id: str) -> JobFailed:
    """Return the error of a job that can't continue with the model and the adapters that it began with."""
    message = (
        f"the job began with another model or adapter under the name {model_id!r}, and no worker has that any more; "
        "submit it again, or load what was there"
    )
    return JobFailed("model_changed", message)


def grammar_changed(begun: Provenance, here: str) -> JobFailed:
    """Return the error of a constrained job that can't continue because no worker has its version of llguidance."""
    version = f"llguidance {begun.llguidance}" if begun.llguidance else "a version of cellama without llguidance"
    message = (
        f"the job's constrained text began with {version}, and no worker has that any more (this one has {here}): "
        "another version may choose other tokens; submit the job again"
    )
    return JobFailed("grammar_changed", message)
