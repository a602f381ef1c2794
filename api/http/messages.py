"""POST /v1/messages, streamed or not, and /v1/messages/count_tokens, for Anthropic's clients."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cellama.api.anthropic.answers import NO_THREADS, envelope, message_of
from cellama.api.anthropic.bodies import ParsedBody, callers_names, parse_body, parse_counted_body
from cellama.api.anthropic.parameters import COUNT_TOKENS, MESSAGES
from cellama.api.anthropic.stream import PING, MessageStream
from cellama.api.openai.parameters import in_callers_words
from cellama.tasks.contract.errors import InvalidJob, JobError
from cellama.tasks.contract.shapes.workers import ModelView

from .errors import ApiError, of_job
from .parsing import ParsedRequest, flag, read, tokens_of
from .running import Placed, RunningJobs, run_one, unless_gone
from .sse import frame

REQUEST_ID = "request-id"  # Anthropic's clients read this one
Endpoint = Callable[[Request], Awaitable[Response]]
_OURS = ("stream", "service_tier", "cache_salt")
_INSTEAD = {"priority": "service_tier", "cache_scope": "cache_salt"}


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A request for a message. `params` are those of its job."""

    model: str  # as the job names it
    messages: list[dict[str, Any]]
    params: dict[str, Any]
    tier: str
    is_stream: bool
    shows_thoughts: bool
    prompt_tokens: int  # about

    @property
    def max_tokens(self) -> int:
        return int(self.params["max_tokens"])

    @property
    def num_tokens(self) -> int:
        """That it may read and generate, about."""
        return self.prompt_tokens + self.max_tokens


def in_our_words(parsed: ParsedRequest) -> ParsedRequest:
    """The request with Anthropic's tier under the name that all endpoints know."""
    if parsed.body.get("service_tier") != "standard_only":
        return parsed
    return replace(parsed, body={**parsed.body, "service_tier": "default"})


def parse_message(parsed: ParsedRequest, model: ModelView) -> MessageRequest:
    """Return what a body asks for. The payload of its job checks the rest. Raises ApiError."""
    tier, is_stream = parsed.tier(), flag(parsed.body, "stream")
    for name, instead in _INSTEAD.items():
        if name in parsed.body:
            raise ApiError(400, f"{name} can't be given here; use {instead}", param=name)
    try:
        body = parse_body(_own(parsed))
    except InvalidJob as error:
        raise wrong(error, parsed.body) from None
    return MessageRequest(
        model=parsed.name_of(model),
        messages=body.messages,
        params={**body.params, "stream": is_stream, **parsed.params_of_caller()},
        tier=tier,
        is_stream=is_stream,
        shows_thoughts=body.shows_thoughts,
        prompt_tokens=tokens_of(body.messages),
    )


def count_of(parsed: ParsedRequest) -> tuple[ParsedBody, int]:
    """Return the body of a request to count tokens, and about how many tokens it has. Raises ApiError."""
    try:
        body = parse_counted_body(parsed.body)
        return body, tokens_of(body.messages)
    except InvalidJob as error:
        raise wrong(error, parsed.body) from None


def wrong(error: InvalidJob, body: Mapping[str, Any]) -> ApiError:
    """Return what is wrong with the body, under Anthropic's names."""
    message, _ = in_callers_words(str(error), callers_names(body))
    return ApiError(400, message, code=NO_THREADS if message.startswith("thread is ") else None)


def _own(parsed: ParsedRequest) -> dict[str, Any]:
    return {name: value for name, value in parsed.body.items() if name not in _OURS}


def _in_anthropics_words(endpoint: Endpoint) -> Endpoint:
    """What goes wrong comes in Anthropic's envelope."""

    @wraps(endpoint)
    async def answered(request: Request) -> Response:
        try:
            response = await endpoint(request)
        except ApiError as error:
            response = _failed(request, error)
        except JobError as error:
            response = _failed(request, of_job(error))
        response.headers[REQUEST_ID] = request.state.request_id
        return response

    return answered


def _failed(request: Request, error: ApiError) -> Response:
    return JSONResponse(_envelope(request, error), error.status, error.headers)


def _envelope(request: Request, error: ApiError) -> dict[str, Any]:
    return envelope(error.status, error.message, request.state.request_id, error.code)


@_in_anthropics_words
async def create(request: Request) -> Response:
    """POST /v1/messages"""
    parsed = in_our_words(await read(request))
    model = await parsed.gateway.find_model(parsed.caller, parsed.body.get("model"))
    message = await parsed.read_by(parse_message, parsed, model)
    async with RunningJobs(parsed, message.model, message.tier, names=callers_names(parsed.body)) as running:
        await unless_gone(request, _submit(running, message))
        if message.is_stream:
            frames_of = partial(_frames, running, message)
            return await running.stream(frames_of, lambda error: frame(_envelope(request, error), "error"))
        answer = await unless_gone(request, _whole(running, message))
        return JSONResponse(answer, headers=running.headers_for(answer))


@_in_anthropics_words
async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens: a job of the caller's highest priority, which takes no slot."""
    parsed = in_our_words(await read(request))
    model = await parsed.gateway.find_model(parsed.caller, parsed.body.get("model"))
    name, client = parsed.name_of(model), parsed.gateway.client
    message, num_tokens = await parsed.read_by(count_of, parsed)
    submit: Any = client.apply_chat_template
    first = {"wait": True, "priority": parsed.caller.light_priority}
    try:
        result, headers = await run_one(
            parsed,
            name,
            num_tokens,
            lambda key: submit(name, message.messages, idempotency_key=key, **first, **message.params),
            has_usage=False,
        )
    except InvalidJob as error:
        raise wrong(error, parsed.body) from None
    return JSONResponse({"input_tokens": len(result["tokens"])}, headers=headers)


async def _submit(running: RunningJobs, message: MessageRequest) -> None:
    submit: Any = running.parsed.gateway.client.chat
    try:
        await running.admit(message.num_tokens)
        await running.submit(
            lambda key: submit(message.model, message.messages, wait=True, idempotency_key=key, **message.params)
        )
    except InvalidJob as error:
        raise wrong(error, running.parsed.body) from None


async def _whole(running: RunningJobs, message: MessageRequest) -> dict[str, Any]:
    """The body of an answer that comes all at once."""
    thinking_tokens = await running.ended()
    result: Any = await running.result()
    return message_of(
        _message_id(running),
        result,
        max_tokens=message.max_tokens,
        tier=message.tier,
        thinking_tokens=thinking_tokens,
        shows_thoughts=message.shows_thoughts,
    )


async def _frames(
    running: RunningJobs, message: MessageRequest, events: AsyncGenerator[Placed, None]
) -> AsyncGenerator[bytes, None]:
    stream = MessageStream(
        _message_id(running), message.model, message.tier, message.max_tokens, shows_thoughts=message.shows_thoughts
    )
    async for _, event in events:
        shown = [PING] if event["type"] == "ping" else stream.of(event)
        yield b"".join(frame(one, one["type"]) for one in shown)


def _message_id(running: RunningJobs) -> str:
    return f"msg_{running.jobs[0].id}"


ROUTES = (
    Route(MESSAGES, create, methods=["POST"]),
    Route(COUNT_TOKENS, count_tokens, methods=["POST"]),
)
