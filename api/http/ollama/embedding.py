"""The endpoints POST /api/embed and POST /api/embeddings."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cellama.api.http.auth import TIERS
from cellama.api.http.errors import ApiError, wrong
from cellama.api.http.parsing import ParsedRequest, tokens_of
from cellama.api.http.running import run_one
from cellama.api.ollama.bodies import parse_texts
from cellama.api.ollama.parameters import EMBED, EMBEDDINGS
from cellama.tasks.contract.errors import InvalidJob

from .reading import find_named, read_body

_GATEWAY_PARAMETERS = ("model", "service_tier")
NS_PER_S = 1_000_000_000


async def embed(request: Request) -> Response:
    """Handle `POST /api/embed`."""
    started_at = time.monotonic()
    parsed = await read_body(request)
    vectors, num_tokens, headers = await _run(parsed, EMBED)
    answer = {
        "model": parsed.body["model"],
        "embeddings": vectors,
        "total_duration": round((time.monotonic() - started_at) * NS_PER_S),
        "load_duration": 0,
        "prompt_eval_count": num_tokens,
    }
    return JSONResponse(answer, headers=headers)


async def embeddings(request: Request) -> Response:
    """Handle `POST /api/embeddings`."""
    vectors, _, headers = await _run(await read_body(request), EMBEDDINGS)
    return JSONResponse({"embedding": vectors[0] if vectors else []}, headers=headers)


async def _run(parsed: ParsedRequest, url: str) -> tuple[list[Any], int, dict[str, str]]:
    """Return the embeddings, the number of tokens, and the response headers.

    If there is nothing to embed, only look up the model.
    """
    model = await find_named(parsed.gateway, parsed.caller, parsed.body.get("model"))
    name, priority, client = parsed.name_of(model), TIERS[parsed.tier()], parsed.gateway.client
    members = {name: value for name, value in parsed.body.items() if name not in _GATEWAY_PARAMETERS}
    names = {"texts": "input" if url == EMBED else "prompt"}
    try:
        texts, params = await parsed.read_by(parse_texts, members, url)
        if not texts:
            return [], 0, {}
        num_tokens = await parsed.read_by(tokens_of, texts)
        submit: Any = client.embed
        result, headers = await run_one(
            parsed,
            name,
            num_tokens,
            lambda key: submit(
                name,
                texts,
                wait=True,
                idempotency_key=key,
                fairness_key=parsed.fairness_key(),
                priority=priority,
                **params,
            ),
        )
    except InvalidJob as error:
        raise wrong(error, names) from None
    vectors = result["embeddings"]
    if vectors and isinstance(vectors[0][0], list):
        raise ApiError(
            400,
            f"model: {name} returns one vector per token instead of one vector per text; use /v1/embeddings",
            param="model",
        )
    return vectors, result["usage"]["prompt_tokens"], headers


ROUTES = (Route(EMBED, embed, methods=["POST"]), Route(EMBEDDINGS, embeddings, methods=["POST"]))
