"""What earlier attempts at a job have done, read from its journal: the next one continues from there."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from cellama.config.limits import MAX_COMPLETIONS
from cellama.tasks.contract.events import EVENT_FIELD, Event, is_output
from cellama.tasks.contract.keys import journal_key
from cellama.tasks.contract.shapes.results import Logprob, Usage, usage_of

from .provenance import Provenance, provenance_of_event


@dataclass(slots=True)
class Output:
    """One completion so far. `logprobs` are as in the events."""

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # without reasoning
    logprobs: list[Logprob] = field(default_factory=list)
    mirostat_mu: float | None = None  # what mirostat had learned by the last token


@dataclass(slots=True)
class Past:
    """The sum of a job's events so far. `outputs` is by index of the completion."""

    next_seq: int = 0
    seed: int | None = None
    provenance: Provenance | None = None  # what its tokens rest on
    outputs: dict[int, Output] = field(default_factory=dict)
    trimmed: bool = False  # the first events are gone
    lines: set[int] = field(default_factory=set)  # of a chunk, that have ended

    def add(self, event: Event) -> None:
        """Take the next event into account."""
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
        """The text of the first completion so far."""
        return "".join(self.outputs[0].texts) if 0 in self.outputs else ""

    @property
    def usage(self) -> Usage:
        """The usage of what earlier attempts have generated."""
        return usage_of(completion_tokens=self.num_tokens)

    @property
    def num_tokens(self) -> int:
        return sum(len(output.tokens) for output in self.outputs.values())


def outputs_of_line(line: int) -> range:
    """Return the indices that the completions of a line have in the events of a bulk run's slice."""
    return range(line * MAX_COMPLETIONS, (line + 1) * MAX_COMPLETIONS)


def read_past(redis: Redis, job_id: str) -> Past:
    """Return the past of a job; an empty one if it has no journal. Raises RedisError."""
    past = Past()
    entries: Any = redis.xrange(journal_key(job_id))
    for _, fields in entries:
        past.add(json.loads(fields[EVENT_FIELD.encode()]))
    return past


@dataclass(frozen=True, slots=True)
class Earlier:
    """An attempt before another one. Its times are seconds before the other one began."""

    run: str
    began_s: float
    left_s: float  # when it was handed back, or its lease had ended
    is_lost: bool  # its worker reported no end of it
    worker: str


def earlier_of(text: bytes, now: bytes) -> tuple[Earlier, ...]:
    """Parse the reply of begin.lua: the attempt before, and if it was lost, those that it would have reported. The
    oldest comes first."""
    found = []
    for line in text.decode().splitlines():
        run, began_at, left_at, lost, worker = line.split(" ", 4)
        began_s, left_s = (max(0.0, float(now) - float(at)) for at in (began_at, left_at))
        found.append(Earlier(run=run, began_s=began_s, left_s=left_s, is_lost=lost == "1", worker=worker))
    return tuple(found)
