"""Anthropic's endpoints POST /v1/messages (streaming and non-streaming) and POST /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cellama.api.anthropic.answers import NO_THREADS, error_object, message_of
from cellama.api.anthropic.bodies import ParsedBody, callers_names, parse_body, parse_counted_body
from cellama.api.anthropic.parameters import COUNT_TOKENS, MESSAGES
from cellama.api.anthropic.stream import PING, MessageStream
from cellama.api.client.async_client import AsyncClient
from cellama.api.openai.other_servers import UNLIMITED
from cellama.api.openai.parameters import with_callers_names
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.shapes.workers import ModelView

from .errors import ApiError
from .parsing import ParsedRequest, flag, read, rest_of_context, tokens_of, within_limit
from .running import Call, IndexedEvent, JobsRequest, RunningJobs, run_jobs, run_one
from .sse import frame

_GATEWAY_PARAMETERS = ("stream", "service_tier", "cache_salt")
_INSTEAD = {"priority": "service_tier", "cache_scope": "cache_salt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRequest(JobsRequest):
    """A request for a message. One job generates the message."""

    messages: list[dict[str, Any]]
    request_id: str
    shows_reasoning: bool

    def calls(self, client: AsyncClient) -> list[Call]:
        submit: Any = client.chat
        return [lambda key: submit(self.model, self.messages, wait=True, idempotency_key=key, **self.params)]

    def refusal(self, error: InvalidJob) -> ApiError:
        return wrong(error, self.names)

    async def body(self, running: RunningJobs) -> dict[str, Any]:
        thinking_tokens = await running.wait()
        result: Any = await running.result()
        return message_of(
            f"msg_{running.jobs[0].id}",
            result,
            max_tokens=self.params["max_tokens"],
            tier=self.tier,
            thinking_tokens=thinking_tokens,
            shows_reasoning=self.shows_reasoning,
        )

    async def frames(
        self, running: RunningJobs, events: AsyncGenerator[IndexedEvent, None]
    ) -> AsyncGenerator[bytes, None]:
        message_id, max_tokens = f"msg_{running.jobs[0].id}", self.params["max_tokens"]
        stream = MessageStream(message_id, self.model, self.tier, max_tokens, shows_reasoning=self.shows_reasoning)
        async for index, event in events:
            if event["type"] == "ping":
                yield await running.keep_alive(index)
            messages = [PING] if event["type"] == "ping" else stream.of(event)
            yield b"".join(frame(message, message["type"]) for message in messages)

    def error_frame(self, error: ApiError) -> bytes:
        return frame(error_object(error.status, error.message, self.request_id, error.code), "error")


def with_standard_tier(parsed: ParsedRequest) -> ParsedRequest:
    """Return the request with Anthropic's tier `standard_only` replaced by `default`."""
    if parsed.body.get("service_tier") != "standard_only":
        return parsed
    return replace(parsed, body={**parsed.body, "service_tier": "default"})


def parse_message(parsed: ParsedRequest, model: ModelView) -> MessageRequest:
    """Parse a body. The job's payload validates the remaining parameters. Raises ApiError."""
    tier, is_stream, names = parsed.tier(), flag(parsed.body, "stream"), callers_names(parsed.body)
    for name, instead in _INSTEAD.items():
        if name in parsed.body:
            raise ApiError(400, f"{name} is not supported by this endpoint; use {instead}", param=name)
    try:
        body = parse_body({name: value for name, value in parsed.body.items() if name not in _GATEWAY_PARAMETERS})
    except InvalidJob as error:
        raise wrong(error, names) from None
    if body.params["max_tokens"] == UNLIMITED:
        body.params["max_tokens"] = within_limit(parsed.caller.max_tokens, rest_of_context(model, body.params))
    return MessageRequest(
        model=parsed.name_of(model),
        messages=body.messages,
        params={**body.params, "stream": is_stream, **parsed.params_of_caller()},
        tier=tier,
        names=names,
        request_id=parsed.request.state.request_id,
        is_stream=is_stream,
        shows_reasoning=body.shows_reasoning,
        prompt_tokens=tokens_of(body.messages),
    )


def count_of(parsed: ParsedRequest) -> tuple[ParsedBody, int]:
    """Parse the body of a token counting request, and estimate the number of tokens. Raises ApiError."""
    try:
        body = parse_counted_body(parsed.body)
        return body, tokens_of(body.messages)
    except InvalidJob as error:
        raise wrong(error, callers_names(parsed.body)) from None


def wrong(error: InvalidJob, names: Mapping[str, str]) -> ApiError:
    """Return the error for an invalid body, using Anthropic's parameter names."""
    message, _ = with_callers_names(str(error), names)
    return ApiError(400, message, code=NO_THREADS if message.startswith("thread is ") else None)


async def create(request: Request) -> Response:
    """Handle `POST /v1/messages`."""
    parsed = with_standard_tier(await read(request))
    model = await parsed.gateway.find_model(parsed.caller, parsed.body.get("model"))
    return await run_jobs(parsed, await parsed.read_by(parse_message, parsed, model))


async def count_tokens(request: Request) -> Response:
    """Handle `POST /v1/messages/count_tokens`.

    The job has the caller's highest priority because it doesn't need a slot.
    """
    parsed = with_standard_tier(await read(request))
    model = await parsed.gateway.find_model(parsed.caller, parsed.body.get("model"))
    name, client = parsed.name_of(model), parsed.gateway.client
    message, num_tokens = await parsed.read_by(count_of, parsed)
    submit: Any = client.apply_chat_template
    options = parsed.light_options
    try:
        result, headers = await run_one(
            parsed,
            name,
            num_tokens,
            lambda key: submit(name, message.messages, idempotency_key=key, **options, **message.params),
            has_usage=False,
        )
    except InvalidJob as error:
        raise wrong(error, callers_names(parsed.body)) from None
    return JSONResponse({"input_tokens": len(result["tokens"])}, headers=headers)


ROUTES = (
    Route(MESSAGES, create, methods=["POST"]),
    Route(COUNT_TOKENS, count_tokens, methods=["POST"]),
)
