"""The endpoints for tokenizing and detokenizing.

Tokenizing and detokenizing jobs don't need a slot, so they have the caller's highest priority.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cellama.api.openai.other_servers import convert
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.names import DEFAULT_MODEL
from cellama.tasks.contract.shapes.workers import ModelView

from .errors import ApiError, of_job
from .parsing import ParsedRequest, check_known, flag, read, tokens_of
from .running import run_one

_PIECES = ("with_pieces", "return_token_strs")  # llama-server's and vLLM's names
TOKENIZED_TEXT = ("model", "content", "prompt", "add_special", "add_special_tokens", "parse_special", *_PIECES)
_TEMPLATE_PARAMETERS = (
    *("tools", "tool_choice", "enable_thinking", "template_args", "chat_template_kwargs", "chat_template"),
    *("add_generation_prompt", "continue_final_message"),
)
TOKENIZED_CHAT = ("model", "messages", "add_special_tokens", *_TEMPLATE_PARAMETERS, *_PIECES)
DETOKENIZED = ("model", "tokens")


async def tokenize(request: Request) -> Response:
    """Handle `POST /tokenize`."""
    parsed = await read(request)
    body, client = parsed.body, parsed.gateway.client
    has_strings, has_pieces = flag(body, "return_token_strs"), flag(body, "with_pieces")
    pieces = {"return_pieces": True} if has_strings or has_pieces else {}
    if "messages" in body:
        params = _chat_params(body) | pieces
        model, result, headers = await _run(parsed, client.apply_chat_template, body["messages"], params)
    else:
        check_known(body, TOKENIZED_TEXT)
        content = body.get("content", body.get("prompt"))
        params = {
            "add_special": flag(body, "add_special", default=flag(body, "add_special_tokens", default=True)),
            "parse_special": flag(body, "parse_special"),
            **pieces,
        }
        model, result, headers = await _run(parsed, client.tokenize, content, params)
    tokens, texts = result["tokens"], result.get("pieces", [])
    answer = {"tokens": tokens, "count": len(tokens), "model": result["model"]}
    if has_strings:
        answer["token_strs"] = [
            text if isinstance(text, str) else bytes(text).decode(errors="replace") for text in texts
        ]
    if has_pieces:
        answer["tokens"] = [{"id": token, "piece": text} for token, text in zip(tokens, texts, strict=True)]
    return JSONResponse({**answer, "max_model_len": model.get("ctx_per_slot")}, headers=headers)


def _chat_params(body: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of the job that renders a chat. Raises ApiError."""
    check_known(body, TOKENIZED_CHAT)
    if flag(body, "add_special_tokens"):
        raise ApiError(
            400,
            "add_special_tokens is True, but the chat template already adds special tokens; leave it out",
            param="add_special_tokens",
        )
    given = {name: body[name] for name in _TEMPLATE_PARAMETERS if body.get(name) is not None}
    try:
        return convert(given, {})
    except InvalidJob as error:
        raise of_job(error) from None


async def detokenize(request: Request) -> Response:
    """Handle `POST /detokenize`."""
    parsed = await read(request)
    check_known(parsed.body, DETOKENIZED)
    _, result, headers = await _run(parsed, parsed.gateway.client.detokenize, parsed.body.get("tokens"), {})
    text = result["text"]
    return JSONResponse({"content": text, "prompt": text, "model": result["model"]}, headers=headers)


async def _run(
    parsed: ParsedRequest, submit: Any, content: Any, params: dict[str, Any]
) -> tuple[ModelView, Any, dict[str, str]]:
    """Run a job. If `model` is missing, as in requests for llama-server, the default model runs the job."""
    model = await parsed.gateway.find_model(parsed.caller, parsed.body.get("model") or DEFAULT_MODEL)
    name, options = parsed.name_of(model), parsed.light_options
    try:
        result, headers = await run_one(
            parsed,
            name,
            await parsed.read_by(tokens_of, content),
            lambda key: submit(name, content, idempotency_key=key, **options, **params),
            has_usage=False,
        )
    except InvalidJob as error:
        raise of_job(error) from None
    return model, result, headers


ROUTES = (
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
)
