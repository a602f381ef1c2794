"""The endpoints that embed texts and rerank documents."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cellama.api.openai.answers import embeddings_of
from cellama.api.openai.bodies import params_of_body
from cellama.api.openai.parameters import EMBEDDINGS, PARAMETERS, callers_names
from cellama.api.openai.reranking import RERANK, params_of_rerank, ranking_of, returns_documents
from cellama.tasks.contract.errors import InvalidJob

from .auth import TIERS
from .errors import ApiError, wrong
from .parsing import ParsedRequest, read, tokens_of
from .running import run_one

ALIASES = ("/v1/reranking", "/v2/rerank")
_GATEWAY_PARAMETERS = ("model", "service_tier", "priority")


async def embed(request: Request) -> Response:
    """Handle `POST /v1/embeddings`."""
    parsed = await read(request)
    client = parsed.gateway.client
    model = await _model(parsed)
    try:
        job_parameters = {name: value for name, value in parsed.body.items() if name not in _GATEWAY_PARAMETERS}
        params = await parsed.read_by(params_of_body, EMBEDDINGS, job_parameters)
        texts = params.pop("texts")
        result, headers = await _run(parsed, model, texts, client.embed, texts, params)
    except InvalidJob as error:
        raise wrong(error, callers_names(PARAMETERS[EMBEDDINGS], parsed.body)) from None
    return JSONResponse(embeddings_of(result), headers=headers)


async def rerank(request: Request) -> Response:
    """Handle `POST /v1/rerank`."""
    parsed = await read(request)
    body, client = parsed.body, parsed.gateway.client
    model = await _model(parsed)
    try:
        with_documents, params = returns_documents(body), params_of_rerank(body)
        query, documents = params.pop("query"), params["documents"]
        result, headers = await _run(parsed, model, documents, client.rerank, query, params)
    except InvalidJob as error:
        raise wrong(error, {}) from None
    return JSONResponse(ranking_of(result, documents if with_documents else None), headers=headers)


async def _model(parsed: ParsedRequest) -> str:
    if "priority" in parsed.body:
        raise ApiError(400, "priority is not supported by this endpoint; use service_tier", param="priority")
    return parsed.name_of(await parsed.gateway.find_model(parsed.caller, parsed.body.get("model")))


async def _run(
    parsed: ParsedRequest, model: str, texts: Any, submit: Any, content: Any, params: dict[str, Any]
) -> tuple[Any, dict[str, str]]:
    priority = TIERS[parsed.tier()]
    num_tokens = await parsed.read_by(tokens_of, texts)
    return await run_one(
        parsed,
        model,
        num_tokens,
        lambda key: submit(
            model,
            content,
            wait=True,
            idempotency_key=key,
            fairness_key=parsed.fairness_key(),
            priority=priority,
            **params,
        ),
    )


ROUTES = (
    Route(EMBEDDINGS, embed, methods=["POST"]),
    *(Route(path, rerank, methods=["POST"]) for path in (RERANK, *ALIASES)),
)
