"""POST /v1/chat/completions and /v1/completions, streamed or not."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cellama.api.client.async_client import AsyncJob
from cellama.api.openai.answers import body_of
from cellama.api.openai.bodies import params_of_body
from cellama.api.openai.chunks import Chunks
from cellama.api.openai.parameters import CHAT, COMPLETIONS, PARAMETERS, callers_names
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import shorten
from cellama.tasks.contract.shapes.workers import ModelView

from .errors import ApiError, wrong
from .parsing import ParsedRequest, count, flag, read, rest_of_context, tokens_of, within_limit
from .running import Placed, RunningJobs, unless_gone
from .sse import DONE, KEEP_ALIVE, frame

MAX_PROMPTS = 128  # of one request: a job and a stream for each
TEXT_TOKENS = 16  # of a text that does not say how many, as at OpenAI's
PREFIXES = {"chat": "chatcmpl", "generate": "cmpl"}  # of the ids of answers
KINDS = {CHAT: "chat", COMPLETIONS: "generate"}
_OURS = ("stream", "stream_options", "service_tier", "cache_salt")


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request for completions. `params` are those of each job, which has one of the `contents`."""

    url: str
    model: str  # as the job names it
    contents: tuple[Any, ...]
    params: dict[str, Any]
    tier: str
    is_stream: bool
    include_usage: bool
    prompt_tokens: int  # of all contents, about

    @property
    def kind(self) -> str:
        return KINDS[self.url]

    @property
    def n(self) -> int:
        return count(self.params.get("n"), 1)

    @property
    def num_jobs(self) -> int:
        """Texts that it has generated: of each prompt as many as it has choices."""
        return len(self.contents) * self.n

    @property
    def num_tokens(self) -> int:
        """That it may read and generate, about."""
        return self.prompt_tokens + self.num_jobs * count(self.params["max_tokens"], 1)


def parse_completion(parsed: ParsedRequest, url: str, model: ModelView) -> CompletionRequest:
    """Return what a body asks for. The payloads of its jobs check the rest. Raises ApiError."""
    body = parsed.body
    tier = parsed.tier()
    is_stream, include_usage = _stream(body)
    own = {name: value for name, value in body.items() if name not in _OURS}
    try:
        params = params_of_body(url, own)
    except InvalidJob as error:
        raise wrong(error, callers_names(PARAMETERS[url], body)) from None
    for name, instead in (("priority", "service_tier"), ("cache_scope", "cache_salt")):
        if name in params:
            raise ApiError(400, f"{name} can't be given here; use {instead}", param=name)
    del params["model"]
    content = params.pop("messages" if url == CHAT else "prompt")
    params |= {"stream": is_stream, **parsed.params_of_caller()}
    contents = _contents(content, url)
    if "max_tokens" not in params:
        most = TEXT_TOKENS if url == COMPLETIONS else rest_of_context(model, params)
        num_answers = len(contents) * count(params.get("n"), 1)
        params["max_tokens"] = within_limit(parsed.caller.max_tokens, most, num_answers)
    return CompletionRequest(
        url=url,
        model=parsed.name_of(model),
        contents=contents,
        params=params,
        tier=tier,
        is_stream=is_stream,
        include_usage=include_usage,
        prompt_tokens=tokens_of(*contents),
    )


def _contents(content: Any, url: str) -> tuple[Any, ...]:
    """One for each job: a completion may have several prompts."""
    several = url == COMPLETIONS and isinstance(content, list) and content and not isinstance(content[0], int)
    if not several:
        return (content,)
    if len(content) > MAX_PROMPTS:
        raise ApiError(
            400,
            f"prompt has {len(content)} entries, and the limit is {MAX_PROMPTS}; send them in several requests, "
            "or as a batch",
            param="prompt",
        )
    return tuple(content)


def _stream(body: dict[str, Any]) -> tuple[bool, bool]:
    """Whether it streams, and with the usage at the end."""
    is_stream, options = flag(body, "stream"), body.get("stream_options")
    if options is None:
        return is_stream, False
    if not isinstance(options, dict):
        raise ApiError(400, f"stream_options is {shorten(options)}; it must be an object", param="stream_options")
    if not is_stream:
        raise ApiError(400, "stream_options is given, and stream is not true; leave it out", param="stream_options")
    return True, flag(options, "include_usage")


async def chat(request: Request) -> Response:
    """POST /v1/chat/completions"""
    return await _answer(await read(request), CHAT)


async def complete(request: Request) -> Response:
    """POST /v1/completions"""
    return await _answer(await read(request), COMPLETIONS)


async def _answer(parsed: ParsedRequest, url: str) -> Response:
    model = await parsed.gateway.find_model(parsed.caller, parsed.body.get("model"))
    completion = await parsed.read_by(parse_completion, parsed, url, model)
    names = callers_names(PARAMETERS[url], parsed.body)
    async with RunningJobs(parsed, completion.model, completion.tier, names=names) as running:
        await unless_gone(parsed.request, _submit(running, completion))
        if completion.is_stream:
            frames_of = partial(_frames, running, completion)
            return await running.stream(frames_of, lambda error: frame(error.envelope))
        answer = await unless_gone(parsed.request, _whole(running, completion))
        return JSONResponse(answer, headers=running.headers_for(answer))


async def _submit(running: RunningJobs, completion: CompletionRequest) -> None:
    client = running.parsed.gateway.client
    submit: Any = client.chat if completion.kind == "chat" else client.generate
    try:
        await running.admit(completion.num_tokens, completion.num_jobs)
        await running.submit(*(_call(submit, completion, content) for content in completion.contents))
    except InvalidJob as error:
        raise wrong(error, running.names) from None


def _call(submit: Any, completion: CompletionRequest, content: Any) -> Callable[[str | None], Awaitable[AsyncJob[Any]]]:
    return lambda key: submit(completion.model, content, wait=True, idempotency_key=key, **completion.params)


async def _whole(running: RunningJobs, completion: CompletionRequest) -> dict[str, Any]:
    """The body of an answer that comes all at once."""
    reasoning_tokens = await running.ended()
    results: Any = [await running.result(place) for place in range(len(running.jobs))]
    answer = body_of(completion.kind, _answer_id(running, completion), results, reasoning_tokens)
    return {**answer, "service_tier": completion.tier}


async def _frames(
    running: RunningJobs, completion: CompletionRequest, events: AsyncGenerator[Placed, None]
) -> AsyncGenerator[bytes, None]:
    chunks = Chunks(
        completion.kind,
        _answer_id(running, completion),
        completion.model,
        completion.n,
        include_usage=completion.include_usage,
        shown={"service_tier": completion.tier},
    )
    async for placed in events:
        yield await _frames_of(running, chunks, placed)
    yield b"".join(map(frame, chunks.usage())) + DONE


async def _frames_of(running: RunningJobs, chunks: Chunks, placed: Placed) -> bytes:
    """What is told of an event; of several choices only the result has all ends."""
    place, event = placed
    if event["type"] == "ping":
        return KEEP_ALIVE
    if event["type"] != "done":
        return b"".join(map(frame, chunks.of(place, event)))
    result: Any = await running.result(place) if chunks.n > 1 else {}
    return b"".join(map(frame, chunks.ends(place, event, result.get("choices", ()))))


def _answer_id(running: RunningJobs, completion: CompletionRequest) -> str:
    return f"{PREFIXES[completion.kind]}-{running.jobs[0].id}"


ROUTES = (Route(CHAT, chat, methods=["POST"]), Route(COMPLETIONS, complete, methods=["POST"]))
