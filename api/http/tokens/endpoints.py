"""Texts to token ids, and back: jobs of the caller's highest priority, which take no slot."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cellama.api.http.allowance import tokens_of
from cellama.api.http.asking import Asked, flag, read
from cellama.api.http.errors import ApiError, of_job
from cellama.api.http.running import run_one
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import shorten
from cellama.tasks.contract.names import DEFAULT_MODEL
from cellama.tasks.contract.shapes.workers import ModelView

_OF_TEXT = ("model", "content", "prompt", "add_special", "add_special_tokens", "parse_special")
_OF_CHAT = ("model", "messages", "tools")
_OF_TOKENS = ("model", "tokens")


async def tokenize(request: Request) -> Response:
    """POST /tokenize"""
    asked = await read(request)
    body, client = asked.body, asked.gateway.client
    if "messages" in body:
        _check(body, _OF_CHAT)
        params = {"tools": body["tools"]} if body.get("tools") else {}
        model, result, headers = await _run(asked, client.apply_chat_template, body["messages"], params)
    else:
        _check(body, _OF_TEXT)
        content = body.get("content", body.get("prompt"))
        params = {
            "add_special": flag(body, "add_special", default=flag(body, "add_special_tokens", default=True)),
            "parse_special": flag(body, "parse_special"),
        }
        model, result, headers = await _run(asked, client.tokenize, content, params)
    tokens = result["tokens"]
    shown = {"tokens": tokens, "count": len(tokens), "model": result["model"]}
    return JSONResponse({**shown, "max_model_len": model.get("ctx_per_slot")}, headers=headers)


async def detokenize(request: Request) -> Response:
    """POST /detokenize"""
    asked = await read(request)
    _check(asked.body, _OF_TOKENS)
    _, result, headers = await _run(asked, asked.gateway.client.detokenize, asked.body.get("tokens"), {})
    text = result["text"]
    return JSONResponse({"content": text, "prompt": text, "model": result["model"]}, headers=headers)


def _check(body: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in body:
        if name not in known:
            raise ApiError(400, f"unknown parameter {shorten(name)}; known: {', '.join(known)}", param=name)


async def _run(
    asked: Asked, submit: Any, content: Any, params: dict[str, Any]
) -> tuple[ModelView, Any, dict[str, str]]:
    """llama-server's form names no model: then it is the default."""
    model = await asked.gateway.directory.find(asked.caller, asked.body.get("model") or DEFAULT_MODEL)
    own, first = asked.name_of(model), {"wait": True, "priority": asked.caller.light_priority}
    try:
        result, headers = await run_one(
            asked,
            own,
            await asked.read_by(tokens_of, content),
            lambda key: submit(own, content, idempotency_key=key, **first, **params),
            has_usage=False,
        )
    except InvalidJob as error:
        raise of_job(error) from None
    return model, result, headers


ROUTES = (
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
)
