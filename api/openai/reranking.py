"""Convert request bodies and results of `/v1/rerank`, which use Jina's and Cohere's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import shorten

RERANK = "/v1/rerank"
KNOWN = ("model", "query", "documents", "top_n", "truncate", "return_documents", "service_tier")


def params_of_rerank(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job's parameters, except the model. Raises InvalidJob."""
    for name in body:
        if name not in KNOWN:
            raise InvalidJob(f"unknown parameter {shorten(name)}; known parameters: {', '.join(KNOWN)}")
    returns_documents(body)
    documents = body.get("documents")
    if not isinstance(documents, list):
        raise InvalidJob(f"documents is {type(documents).__name__}; it must be a list of strings")
    texts = [document.get("text") if isinstance(document, dict) else document for document in documents]
    params = {name: body[name] for name in ("top_n", "truncate") if body.get(name) is not None}
    return {"query": body.get("query"), "documents": texts, **params}


def returns_documents(body: Mapping[str, Any]) -> bool:
    """Return whether the answer should include the documents. Raises InvalidJob."""
    value = body.get("return_documents")
    if value not in (None, True, False):
        raise InvalidJob(f"return_documents is {shorten(value)}; it must be true or false")
    return value is True


def ranking_of(result: Mapping[str, Any], documents: Sequence[Any] | None) -> dict[str, Any]:
    """Return the response body. If `documents` are given, the results include them."""
    results = [
        {"index": ranked["index"], "relevance_score": ranked["score"]}
        | ({} if documents is None else {"document": {"text": documents[ranked["index"]]}})
        for ranked in result["results"]
    ]
    tokens = result["usage"]["prompt_tokens"]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": result["model"], "results": results, "usage": usage}
