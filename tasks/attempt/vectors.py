"""Compute embeddings and rerank documents, and encode vectors as JSON. Only workers use this module."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cellama.config import limits
from cellama.engine import EmbeddingHandle, InvalidRequest, Model, scores_of
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.contract.json_values import Encoded
from cellama.tasks.contract.kinds.embed import EmbedJob, EmbedResult
from cellama.tasks.contract.kinds.rerank import Ranked, RerankJob, RerankResult
from cellama.tasks.contract.shapes.results import Usage, usage_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

DECIMALS = 8  # decimals of numbers in unit vectors, which is the precision of float32
_WIDTH = DECIMALS + 4  # sign or space, one digit, point, decimals, comma
Wait = Callable[[EmbeddingHandle, float | None], None]


def embed(model: Model, job: EmbedJob, wait: Wait) -> EmbedResult:
    """Embed a job's texts. `wait` must block until the vectors are computed. Raises EngineError or JobFailed."""
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
    """Return the result of a job whose texts have been embedded. Raises EngineError."""
    embedder, vectors = model.embedder, handle.result()
    result: EmbedResult = {"embeddings": _encoded(vectors, job), "usage": _usage(handle), "model": model.id}
    if embedder.per_token and job.encoding == "base64":
        result["shapes"] = [list(vector.shape) for vector in vectors]
    return result


def wait_for(handle: EmbeddingHandle, timeout_s: float | None, submitted_at: float) -> None:
    """Wait until the vectors are computed. `submitted_at` is a monotonic time in seconds.

    Raises JobFailed if `timeout_s` seconds have passed since `submitted_at`, and EngineError if the computation failed.
    """
    remaining_s = None if timeout_s is None else max(0.0, submitted_at + timeout_s - time.monotonic())
    try:
        handle.result(remaining_s)
    except TimeoutError:
        handle.cancel()
        message = (
            f"timeout: {timeout_s} s passed before all texts were computed; increase the timeout, or send fewer texts"
        )
        raise JobFailed("timeout", message) from None


def rerank(model: Model, job: RerankJob, wait: Wait) -> RerankResult:
    """Return the indices and scores of the best documents, in descending order of score.

    Documents with equal scores keep their order. Raises EngineError or JobFailed.
    """
    handle = submit_documents(model, job)
    wait(handle, job.timeout)
    return ranking_of(model, job, handle)


def submit_documents(model: Model, job: RerankJob) -> EmbeddingHandle:
    """Submit a job's query and documents to the reranker. Raises EngineError."""
    model.require("rerank")
    return model.reranker.submit(job.query, job.documents, truncate=job.truncate)


def ranking_of(model: Model, job: RerankJob, handle: EmbeddingHandle) -> RerankResult:
    """Return the result of a job whose documents have been scored. Raises EngineError."""
    ranked = sorted(enumerate(scores_of(handle)), key=lambda entry: -entry[1])
    results: list[Ranked] = [{"index": index, "score": score} for index, score in ranked[: job.top_n]]
    return {"results": results, "usage": _usage(handle), "model": model.id}


def _check_size(num_vectors: int, dimensions: int) -> None:
    if num_vectors * dimensions > (limit := limits.MAX_NUMBERS):
        raise InvalidRequest(
            f"texts: the result would have {num_vectors} vectors of {dimensions} numbers, and the limit is {limit} "
            "numbers; send fewer texts per job, or choose fewer dimensions"
        )


def _encoded(vectors: Sequence[NDArray[np.float32]], job: EmbedJob) -> Any:
    """Return the vectors as JSON arrays or as base64."""
    if job.encoding == "list":
        return [as_list(vector, unit=job.normalize) for vector in vectors]
    return [as_base64(vector) for vector in vectors]


def _usage(handle: EmbeddingHandle) -> Usage:
    return usage_of(prompt_tokens=sum(map(len, handle.texts)))


def as_base64(vector: NDArray[np.float32]) -> Encoded:
    """Encode a vector as base64 of little-endian float32, as in the OpenAI API. Several vectors are concatenated."""
    return Encoded(b'"' + base64.b64encode(vector.astype("<f4").tobytes()) + b'"')


def as_list(vector: NDArray[np.float32], *, unit: bool) -> Encoded:
    """Encode a vector as a JSON array, or several vectors of a text as an array of arrays.

    If the vectors are of `unit` length, they are encoded faster and with fewer characters.
    """
    write = _unit_row if unit else _row
    if vector.ndim == 1:
        return Encoded(write(vector))
    return Encoded(b"[" + b",".join(write(row) for row in vector) + b"]")


def _row(row: NDArray[np.float32]) -> bytes:
    return json.dumps(row.tolist(), separators=(",", ":")).encode()


def _unit_row(row: NDArray[np.float32]) -> bytes:
    """Format numbers by filling a matrix of characters, one digit position at a time.

    The `json` module takes 6 times as long.
    """
    magnitudes = np.abs(row.astype("f8"))
    if not (magnitudes < 10).all():  # not of unit length, or not finite
        return _row(row)
    digits, tens = np.rint(magnitudes * 10**DECIMALS).astype(np.uint32), np.uint32(10)
    text = np.empty((len(row), _WIDTH), np.uint8)
    text[:, 0] = np.where(row < 0, ord("-"), ord(" "))
    for column in (*range(_WIDTH - 2, 2, -1), 1):
        digits, digit = np.divmod(digits, tens)
        text[:, column] = digit + ord("0")
    text[:, 2], text[:, -1] = ord("."), ord(",")
    return b"[" + text.tobytes()[:-1] + b"]"
