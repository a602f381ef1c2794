"""The streaming and non-streaming endpoints POST /v1/chat/completions and POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cellama.api.client.async_client import AsyncClient, AsyncJob
from cellama.api.openai.answers import body_of, fingerprint_of
from cellama.api.openai.bodies import params_of_body
from cellama.api.openai.chunks import Chunks
from cellama.api.openai.other_servers import UNLIMITED
from cellama.api.openai.parameters import CHAT, COMPLETIONS, PARAMETERS, callers_names
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import shorten
from cellama.tasks.contract.shapes.workers import ModelView

from .errors import ApiError, wrong
from .parsing import ParsedRequest, count, flag, read, rest_of_context, tokens_of, within_limit
from .running import Call, IndexedEvent, JobsRequest, RunningJobs, run_jobs
from .sse import DONE, frame

MAX_PROMPTS = 128  # maximum prompts per request: each is a job and a stream
TEXT_TOKENS = 16  # default of max_tokens for a completion, as in OpenAI's API
PREFIXES = {"chat": "chatcmpl", "generate": "cmpl"}  # prefix of response ids
KINDS = {CHAT: "chat", COMPLETIONS: "generate"}
_GATEWAY_PARAMETERS = ("stream", "stream_options", "service_tier", "cache_salt")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(JobsRequest):
    """A completion request. Each entry in `contents` becomes a job."""

    url: str
    contents: tuple[Any, ...]
    include_usage: bool
    fingerprint: str  # of the model that answers

    @property
    def kind(self) -> str:
        return KINDS[self.url]

    @property
    def n(self) -> int:
        return count(self.params.get("n"), 1)

    @property
    def num_jobs(self) -> int:
        """The number of prompts multiplied by the number of choices."""
        return len(self.contents) * self.n

    def calls(self, client: AsyncClient) -> list[Call]:
        submit: Any = client.chat if self.kind == "chat" else client.generate

        async def call(content: Any, key: str | None) -> AsyncJob[Any]:
            job: AsyncJob[Any] = await submit(self.model, content, wait=True, idempotency_key=key, **self.params)
            return job

        return [partial(call, content) for content in self.contents]

    def refusal(self, error: InvalidJob) -> ApiError:
        return wrong(error, self.names)

    async def body(self, running: RunningJobs) -> dict[str, Any]:
        reasoning_tokens = await running.wait()
        results: Any = [await running.result(index) for index in range(len(running.jobs))]
        body = body_of(self.kind, self._answer_id(running), results, reasoning_tokens)
        return {**body, **self._common}

    async def frames(
        self, running: RunningJobs, events: AsyncGenerator[IndexedEvent, None]
    ) -> AsyncGenerator[bytes, None]:
        chunks = Chunks(
            self.kind,
            self._answer_id(running),
            self.model,
            self.n,
            include_usage=self.include_usage,
            common=self._common,
        )
        async for index, event in events:
            if event["type"] == "ping":
                yield await running.keep_alive(index)
            elif event["type"] == "done":  # with several choices, only the result has all finish reasons
                result: Any = await running.result(index) if self.n > 1 else {}
                yield b"".join(map(frame, chunks.ends(index, event, result.get("choices", ()))))
            else:
                yield b"".join(map(frame, chunks.of(index, event)))
        yield b"".join(map(frame, chunks.usage())) + DONE

    def error_frame(self, error: ApiError) -> bytes:
        return frame(error.envelope)

    @property
    def _common(self) -> dict[str, Any]:
        """The members that the response body and each chunk have in common."""
        return {"service_tier": self.tier, "system_fingerprint": self.fingerprint}

    def _answer_id(self, running: RunningJobs) -> str:
        return f"{PREFIXES[self.kind]}-{running.jobs[0].id}"


def parse_completion(parsed: ParsedRequest, url: str, model: ModelView) -> CompletionRequest:
    """Parse a body. The jobs' payloads validate the remaining parameters. Raises ApiError."""
    body = parsed.body
    tier, names = parsed.tier(), callers_names(PARAMETERS[url], body)
    is_stream, include_usage = _stream(body)
    job_parameters = {name: value for name, value in body.items() if name not in _GATEWAY_PARAMETERS}
    try:
        params = params_of_body(url, job_parameters)
    except InvalidJob as error:
        raise wrong(error, names) from None
    for name, instead in (("priority", "service_tier"), ("cache_scope", "cache_salt")):
        if name in params:
            raise ApiError(400, f"{name} is not supported by this endpoint; use {instead}", param=name)
    del params["model"]
    content = params.pop("messages" if url == CHAT else "prompt")
    params |= {"stream": is_stream, **parsed.params_of_caller()}
    contents = _contents(content, url)
    if params.get("max_tokens") in (None, UNLIMITED):
        has_default = url == COMPLETIONS and "max_tokens" not in params
        max_tokens = TEXT_TOKENS if has_default else rest_of_context(model, params)
        num_answers = len(contents) * count(params.get("n"), 1)
        params["max_tokens"] = within_limit(parsed.caller.max_tokens, max_tokens, num_answers)
    return CompletionRequest(
        url=url,
        model=parsed.name_of(model),
        contents=contents,
        params=params,
        tier=tier,
        names=names,
        is_stream=is_stream,
        include_usage=include_usage,
        fingerprint=fingerprint_of(model.get("fingerprint", "")),
        prompt_tokens=tokens_of(*contents),
    )


def _contents(content: Any, url: str) -> tuple[Any, ...]:
    """Return each job's content. A completion request may contain several prompts."""
    several = url == COMPLETIONS and isinstance(content, list) and content and not isinstance(content[0], int)
    if not several:
        return (content,)
    if len(content) > MAX_PROMPTS:
        raise ApiError(
            400,
            f"prompt has {len(content)} entries, and the limit is {MAX_PROMPTS}; send several requests, or a batch",
            param="prompt",
        )
    return tuple(content)


def _stream(body: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether to stream the answer, and whether to stream the usage."""
    is_stream, options = flag(body, "stream"), body.get("stream_options")
    if options is None:
        return is_stream, False
    if not isinstance(options, dict):
        raise ApiError(400, f"stream_options is {shorten(options)}; it must be an object", param="stream_options")
    if not is_stream:
        raise ApiError(
            400, "stream_options requires stream: true; set stream, or remove stream_options", param="stream_options"
        )
    return True, flag(options, "include_usage")


async def chat(request: Request) -> Response:
    """Handle `POST /v1/chat/completions`."""
    return await _answer(await read(request), CHAT)


async def complete(request: Request) -> Response:
    """Handle `POST /v1/completions`."""
    return await _answer(await read(request), COMPLETIONS)


async def _answer(parsed: ParsedRequest, url: str) -> Response:
    model = await parsed.gateway.find_model(parsed.caller, parsed.body.get("model"))
    return await run_jobs(parsed, await parsed.read_by(parse_completion, parsed, url, model))


ROUTES = (Route(CHAT, chat, methods=["POST"]), Route(COMPLETIONS, complete, methods=["POST"]))
