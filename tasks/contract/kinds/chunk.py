"""The kind `chunk`, a job that runs many lines of a bulk run.

Each line is validated when it is read, and again before it is run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StrictStr
from typing_extensions import TypedDict

from ..names import PRIORITY_BULK
from ..payloads import BaseJob, Payload, parse_job
from ..shapes.results import Usage
from . import Kind
from .chat import ChatJob
from .embed import EmbedJob
from .generate import GenerateJob
from .rerank import RerankJob

TASK_CHUNK = "cellama.chunk"
MAX_CHUNK_LINES = 1024
LineKind = Literal["generate", "chat", "embed", "rerank"]
LineJob = GenerateJob | ChatJob | EmbedJob | RerankJob
LINE_JOBS: dict[LineKind, type[GenerateJob] | type[ChatJob] | type[EmbedJob] | type[RerankJob]] = {
    "generate": GenerateJob,
    "chat": ChatJob,
    "embed": EmbedJob,
    "rerank": RerankJob,
}


class ChunkLine(Payload):
    """A line of a bulk run, with the parameters of a single job except `model` and `priority`."""

    kind: LineKind
    params: dict[StrictStr, Any]


class ChunkJob(BaseJob):
    """Lines that one worker runs together. The lines get slots in the given order."""

    lines: Annotated[tuple[ChunkLine, ...], Field(min_length=1, max_length=MAX_CHUNK_LINES)]


def line_bytes(kind: LineKind, params: Mapping[str, Any]) -> int:
    """Return the number of bytes that a line adds to its chunk's message."""
    text = json.dumps({"kind": kind, "params": params}, ensure_ascii=False)
    return len(text.encode(errors="surrogatepass")) + len(", ")


def max_lines_bytes(model: str, max_payload_bytes: int) -> int:
    """Return the maximum number of bytes that a chunk's lines may use in its message."""
    return max_payload_bytes - len(json.dumps([[model, []], {"priority": PRIORITY_BULK}]))


def job_of_line(line: ChunkLine, model: str, priority: int) -> LineJob:
    """Convert a line's payload into the payload of a single job. Raises InvalidJob."""
    params = {**line.params, "model": model, "priority": priority}
    return parse_job(LINE_JOBS[line.kind], (), (), params)


class ChunkResult(TypedDict):
    """Result of a chunk in a bulk run. The chunk's events contain the results of its lines."""

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
