"""Chunks of bulk runs: many lines in one job. Each line is checked where it is read, and again where it is run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StrictStr
from typing_extensions import TypedDict

from ..kind import Kind
from ..messages import Payload
from ..names import PRIORITY_BULK
from ..payloads import BaseJob, parse_job
from ..shapes.results import Usage
from .chat import ChatJob
from .embed import EmbedJob
from .generate import GenerateJob

TASK_CHUNK = "cellama.chunk"
MAX_CHUNK_LINES = 1024
LineKind = Literal["generate", "chat", "embed"]
LINE_JOBS: dict[LineKind, type[GenerateJob] | type[ChatJob] | type[EmbedJob]] = {
    "generate": GenerateJob,
    "chat": ChatJob,
    "embed": EmbedJob,
}


class ChunkLine(Payload):
    """A line: the parameters of the job that it would be by itself, but for its model and its priority."""

    kind: LineKind
    params: dict[StrictStr, Any]


class ChunkJob(BaseJob):
    """Lines that one worker runs together, in this order as far as slots go."""

    lines: Annotated[tuple[ChunkLine, ...], Field(min_length=1, max_length=MAX_CHUNK_LINES)]


def line_bytes(kind: LineKind, params: Mapping[str, Any]) -> int:
    """What a line takes of its chunk's message."""
    text = json.dumps({"kind": kind, "params": params}, ensure_ascii=False)
    return len(text.encode(errors="surrogatepass")) + len(", ")


def room_bytes(model: str, max_payload_bytes: int) -> int:
    """What all lines of a chunk may take of its message."""
    return max_payload_bytes - len(json.dumps([[model, []], {"priority": PRIORITY_BULK}]))


def job_of_line(line: ChunkLine, model: str, priority: int) -> GenerateJob | ChatJob | EmbedJob:
    """The job that a line would be by itself. Raises InvalidJob."""
    params = {**line.params, "model": model, "priority": priority}
    return parse_job(LINE_JOBS[line.kind], (), (), params)


class ChunkResult(TypedDict):
    """Result of a chunk of a bulk run; the results of its lines are events."""

    lines: int
    usage: Usage
    model: str


CHUNK = Kind(
    task=TASK_CHUNK,
    payload=ChunkJob,
    positional=("model", "lines"),
    result=ChunkResult,
    is_public=False,
    streams=False,
    keeps_journal=True,
)
