"""Embeddings and reranking: jobs whose results are numbers. Used in workers only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cellama.config import limits
from cellama.engine import EmbeddingHandle, InvalidRequest, Model, scores_of
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.contract.kinds.embed import EmbedJob, EmbedResult
from cellama.tasks.contract.kinds.rerank import Ranked, RerankJob, RerankResult
from cellama.tasks.contract.shapes.results import Usage, usage_of

from .vector_json import as_base64, as_list

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Wait = Callable[[EmbeddingHandle, float | None], None]


def embed(model: Model, job: EmbedJob, wait: Wait) -> EmbedResult:
    """Return the vectors of a job's texts. `wait` returns when they are computed. Raises EngineError, JobFailed."""
    handle = submit_texts(model, job)
    wait(handle, job.timeout)
    return vectors_of(model, job, handle)


def submit_texts(model: Model, job: EmbedJob) -> EmbeddingHandle:
    """Submit a job's texts to the embedder. Raises EngineError."""
    model.require("embed")
    embedder = model.embedder
    tokens = model.tokens_of(job.texts)
    num_tokens = sum(min(len(text), embedder.max_tokens) for text in tokens)
    _check_size(num_tokens if embedder.per_token else len(tokens), job.dimensions or embedder.n_embd)
    return embedder.submit(tokens, normalize=job.normalize, dimensions=job.dimensions, truncate=job.truncate)


def vectors_of(model: Model, job: EmbedJob, handle: EmbeddingHandle) -> EmbedResult:
    """Wait until a job's texts are embedded, and return its result. Raises EngineError."""
    embedder, vectors = model.embedder, handle.result()
    result: EmbedResult = {"embeddings": _encoded(vectors, job), "usage": _usage(handle), "model": model.id}
    if embedder.per_token and job.encoding == "base64":
        result["shapes"] = [list(vector.shape) for vector in vectors]
    return result


def wait_for(handle: EmbeddingHandle, timeout_s: float | None, submitted_at: float) -> None:
    """Wait for the numbers. Raises JobFailed `timeout_s` after `submitted_at` (monotonic s), EngineError."""
    remaining_s = None if timeout_s is None else max(0.0, submitted_at + timeout_s - time.monotonic())
    try:
        handle.result(remaining_s)
    except TimeoutError:
        handle.cancel()
        message = f"the texts were not read within the timeout of {timeout_s} s; raise it, or send fewer texts"
        raise JobFailed("timeout", message) from None


def rerank(model: Model, job: RerankJob, wait: Wait) -> RerankResult:
    """Return the documents' indices and scores, the best first and equal ones in their order.

    Raises EngineError, JobFailed.
    """
    model.require("rerank")
    handle = model.reranker.submit(job.query, job.documents, truncate=job.truncate)
    wait(handle, job.timeout)
    ranked = sorted(enumerate(scores_of(handle)), key=lambda entry: -entry[1])
    results: list[Ranked] = [{"index": index, "score": score} for index, score in ranked[: job.top_n]]
    return {"results": results, "usage": _usage(handle), "model": model.id}


def _check_size(num_vectors: int, dimensions: int) -> None:
    if num_vectors * dimensions > (limit := limits.MAX_NUMBERS):
        raise InvalidRequest(
            f"the result would hold {num_vectors} vectors of {dimensions} numbers, and the limit is {limit} "
            "numbers: send fewer texts per job, or ask for fewer dimensions"
        )


def _encoded(vectors: Sequence[NDArray[np.float32]], job: EmbedJob) -> Any:
    """Return lists of numbers, or base64 texts, as they will be in JSON."""
    if job.encoding == "list":
        return [as_list(vector, unit=job.normalize) for vector in vectors]
    return [as_base64(vector) for vector in vectors]


def _usage(handle: EmbeddingHandle) -> Usage:
    return usage_of(prompt_tokens=sum(map(len, handle.texts)))
