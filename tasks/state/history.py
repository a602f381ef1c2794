"""Read the output and the provenance of earlier attempts at a job, so that the next attempt can continue the job.

The output is read from the job's journal. The provenance is in the `started` event of the first attempt. The provenance
consists of the digests of the model and its adapters, and the version of llguidance if the text is constrained. Each
later attempt continues with the same provenance, or fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from redis import Redis

from cellama.config.limits import MAX_COMPLETIONS
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.contract.events import Event, ProvenanceFields, ReplayFields, StartedEvent, is_output
from cellama.tasks.contract.journal import events_in
from cellama.tasks.contract.keys import journal_key
from cellama.tasks.contract.names import DEFAULT_MODEL
from cellama.tasks.contract.shapes.results import Logprob, Usage, usage_of
from cellama.tasks.contract.shapes.workers import WorkerModel

if TYPE_CHECKING:
    from cellama.engine import AdapterInfo, Model

    from .registry import WorkerEntry

Choice = tuple[tuple[str, float], ...]  # pairs of an adapter's name and its scale


@dataclass(frozen=True, slots=True)
class Provenance:
    """The model and adapters that an attempt uses.

    `model` is the SHA-256 of the model. Each adapter has a name, a SHA-256 and a scale. The scale is 0 for an adapter
    that only some lines of a bulk run choose.
    """

    model: str
    adapters: tuple[tuple[str, str, float], ...] = ()
    sampling: Mapping[str, object] = field(default_factory=dict)  # the model's defaults of sampling parameters
    replay: ReplayFields | None = None  # set if messages of the chat follow a reply
    # The version of llguidance that a constrained job needs. "" stands for cellama without llguidance, None for any.
    llguidance: str | None = None

    def fields(self) -> ProvenanceFields:
        """Return the fields for the `started` event."""
        fields: ProvenanceFields = {"fingerprint": self.model}
        if self.adapters:
            fields["adapters"] = list(self.adapters)
        if self.sampling:
            fields["sampling"] = dict(self.sampling)
        if self.llguidance:
            fields["llguidance"] = self.llguidance
        if self.replay is not None:
            fields["replay"] = self.replay
        return fields

    def is_in(self, model: Model) -> bool:
        """Return whether `model` has these weights, and all of these adapters under the same names."""
        if model.info.fingerprint != self.model:
            return False
        return not self.adapters or self._needs <= {(i.name, i.fingerprint) for i in _ready(model)}

    def is_served_by(self, entry: WorkerModel) -> bool:
        """Return whether a model in the registry has these weights and all of these adapters."""
        loaded = {(adapter["name"], adapter["fingerprint"]) for adapter in entry.get("adapters", ())}
        return entry.get("fingerprint") == self.model and self._needs <= loaded

    @property
    def choice(self) -> Choice:
        """The adapters that apply to a request that does not choose adapters itself, with their scales."""
        return tuple((name, scale) for name, _, scale in self.adapters if scale)

    @property
    def _needs(self) -> set[tuple[str, str]]:
        return {(name, fingerprint) for name, fingerprint, _ in self.adapters}


def provenance_of_event(event: StartedEvent) -> Provenance | None:
    """Return the provenance from a `started` event, or None for an event from an old version of cellama."""
    adapters = tuple((name, fingerprint, scale) for name, fingerprint, scale in event.get("adapters", ()))
    if "fingerprint" not in event:
        return None
    return Provenance(
        event["fingerprint"],
        adapters,
        sampling=event.get("sampling", {}),
        replay=event.get("replay"),
        llguidance=event.get("llguidance"),
    )


def provenance_of(model: Model, choice: Choice | None, also: Iterable[str] = ()) -> Provenance:
    """Return the provenance of a request with these adapters. If `choice` is None, the model's defaults apply.

    Adapters that are not loaded are omitted, because the engine refuses requests that name such adapters. `also`
    contains the names of further adapters, which only some lines of a bulk run choose.
    """
    infos = _ready(model)
    chosen = ((info.name, info.scale) for info in infos) if choice is None else choice
    scales = {**dict.fromkeys(also, 0.0), **{name: scale for name, scale in chosen if scale}}
    adapters = tuple((i.name, i.fingerprint, float(scales[i.name])) for i in infos if i.name in scales)
    return Provenance(model.info.fingerprint, adapters, model.options.sampling_defaults)


def _ready(model: Model) -> list[AdapterInfo]:
    return [info for info in model.adapters() if info.status == "ready"]


def may_be_served(workers: Iterable[WorkerEntry], model_id: str, required: Provenance) -> bool:
    """Return whether a worker can continue the job.

    A worker can continue the job if it has the required model and adapters, had them when it stopped, or is loading a
    model with the same id.
    """
    entries = [e for worker in workers if required.llguidance in (None, worker.llguidance) for e in worker.models]
    served = [e for e in entries if e["id"] == model_id or (model_id == DEFAULT_MODEL and e["default"])]
    return any(entry["status"] == "loading" or required.is_served_by(entry) for entry in served)


def have_adapters(workers: Iterable[WorkerEntry], model_id: str, names: Iterable[str]) -> bool:
    """Return whether a worker has the model with all these adapters."""
    served = [
        e for w in workers for e in w.models if e["id"] == model_id or (model_id == DEFAULT_MODEL and e["default"])
    ]
    ready = [{adapter["name"] for adapter in e.get("adapters", ()) if adapter["status"] == "ready"} for e in served]
    return any(set(names) <= loaded for loaded in ready)


def model_changed(model_id: str) -> JobFailed:
    """Return the error for a job that can't continue with the model and adapters that it started with."""
    message = (
        f"the job started with a different model or adapter named {model_id!r}, which no worker has any more; "
        "submit the job again, or load the previous model and adapters"
    )
    return JobFailed("model_changed", message)


def grammar_changed(begun: Provenance, installed: str) -> JobFailed:
    """Return the error for a constrained job that no worker can continue with the same version of llguidance."""
    version = f"llguidance {begun.llguidance}" if begun.llguidance else "a version of cellama without llguidance"
    message = (
        f"the job's constrained text started with {version}, which no worker has any more (this worker has "
        f"{installed}), and a different version may choose different tokens; submit the job again"
    )
    return JobFailed("grammar_changed", message)


@dataclass(slots=True)
class Output:
    """The output of one completion so far. `logprobs` have the same format as in events."""

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # without reasoning
    logprobs: list[Logprob] = field(default_factory=list)
    mirostat_mu: float | None = None  # the state of mirostat after the last token


@dataclass(slots=True)
class Past:
    """A summary of a job's events so far. `outputs` is keyed by the index of the completion."""

    next_seq: int = 0
    seed: int | None = None
    provenance: Provenance | None = None  # what its tokens depend on
    outputs: dict[int, Output] = field(default_factory=dict)
    trimmed: bool = False  # True if the first events have expired
    lines: set[int] = field(default_factory=set)  # the lines of a chunk that have ended

    def add(self, event: Event) -> None:
        """Add the job's next event to the summary."""
        self.trimmed |= event["seq"] != self.next_seq
        self.next_seq = event["seq"] + 1
        if event["type"] == "started":
            self.seed = event["seed"]
            self.provenance = provenance_of_event(event)
        elif is_output(event):
            output = self.outputs.setdefault(event.get("index", 0), Output())
            output.tokens += event["tokens"]
            if event["type"] == "token":
                output.texts.append(event["text"])
            output.logprobs += event.get("logprobs", [])
            output.mirostat_mu = event.get("mirostat_mu")
        elif event["type"] == "line":
            self.lines.add(event["line"])
            for index in outputs_of_line(event["line"]):
                self.outputs.pop(index, None)

    @property
    def started(self) -> bool:
        return self.seed is not None

    @property
    def text(self) -> str:
        """Return the text of the first completion so far."""
        return "".join(self.outputs[0].texts) if 0 in self.outputs else ""

    @property
    def usage(self) -> Usage:
        """Return the job's usage so far, which counts the tokens that earlier attempts generated."""
        return usage_of(completion_tokens=self.num_tokens)

    @property
    def num_tokens(self) -> int:
        return sum(len(output.tokens) for output in self.outputs.values())


def outputs_of_line(line: int) -> range:
    """Return the indices that a chunk's events use for the completions of one line."""
    return range(line * MAX_COMPLETIONS, (line + 1) * MAX_COMPLETIONS)


def read_past(redis: Redis, job_id: str) -> Past:
    """Return a summary of a job's events, which is empty if the job has no journal. Raises RedisError."""
    past = Past()
    entries: Any = redis.xrange(journal_key(job_id))
    for event in events_in(entries):
        past.add(event)
    return past


@dataclass(frozen=True, slots=True)
class Earlier:
    """An earlier attempt at a job. Its times are in seconds before the start of the current attempt."""

    run: str
    began_s: float
    ended_s: float  # when it was handed back, or its lease had expired
    is_lost: bool  # True if its worker did not report an end
    worker: str


def earlier_of(text: bytes, now: bytes) -> tuple[Earlier, ...]:
    """Parse the earlier attempts in the reply of the script `begin`, oldest first.

    The reply contains the previous attempt. If the previous attempt was lost, it could not report the attempts before
    it, so the reply contains these attempts as well.
    """
    attempts = []
    for line in text.decode().splitlines():
        run, began_at, ended_at, lost, worker = line.split(" ", 4)
        began_s, ended_s = (max(0.0, float(now) - float(at)) for at in (began_at, ended_at))
        attempts.append(Earlier(run=run, began_s=began_s, ended_s=ended_s, is_lost=lost == "1", worker=worker))
    return tuple(attempts)
