"""The kind `rerank`, which sorts documents by how well they answer a query."""

from __future__ import annotations

from pydantic import Field, StrictBool
from typing_extensions import TypedDict

from ..payloads import BaseJob, Count, FilledText, Texts
from ..shapes.results import Usage
from . import Kind

TASK_RERANK = "cellama.rerank"


class RerankJob(BaseJob):
    """Indices and scores of documents, sorted by how well they answer a query, best first."""

    query: FilledText = Field(description="Query to compare the documents with.")
    documents: Texts = Field(description="Documents to rank by their relevance to the query.")
    top_n: Count | None = Field(
        default=None, ge=1, description="Number of results to return, best first (default: all)."
    )
    truncate: StrictBool = Field(
        default=False, description="Truncate documents that are too long instead of rejecting them."
    )


class Ranked(TypedDict):
    """The score of a document. `index` is the document's index in the call."""

    index: int
    score: float


class RerankResult(TypedDict):
    """Result of `rerank`, with the best document first."""

    results: list[Ranked]
    usage: Usage
    model: str


RERANK = Kind(
    task=TASK_RERANK,
    payload=RerankJob,
    positional=("model", "query", "documents"),
    result=RerankResult,
    operation="rerank",
)
