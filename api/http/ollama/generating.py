"""The streaming and non-streaming endpoints POST /api/chat and POST /api/generate."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cellama.api.client.async_client import AsyncClient
from cellama.api.http.errors import ApiError, wrong
from cellama.api.http.parsing import ParsedRequest, flag, rest_of_context, tokens_of, within_limit
from cellama.api.http.running import Call, IndexedEvent, JobsRequest, RunningJobs, run_jobs, run_one
from cellama.api.http.sse import NDJSON, json_line
from cellama.api.ollama.answers import AnswerForm
from cellama.api.ollama.bodies import ParsedOllamaBody, parse_chat, parse_generate, unloads
from cellama.api.ollama.parameters import CHAT, GENERATE
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.shapes.workers import ModelView

from .reading import find_named, read_body

_GATEWAY_PARAMETERS = ("stream", "service_tier", "cache_salt")


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaRequest(JobsRequest):
    """A chat or completion request. One job generates the answer."""

    media_type: ClassVar[str] = NDJSON

    body_of_job: ParsedOllamaBody
    form: AnswerForm

    def calls(self, client: AsyncClient) -> list[Call]:
        submit: Any = client.chat if self.body_of_job.kind == "chat" else client.generate
        content = self.body_of_job.content
        return [lambda key: submit(self.model, content, wait=True, idempotency_key=key, **self.params)]

    def refusal(self, error: InvalidJob) -> ApiError:
        return wrong(error, self.names)

    async def body(self, running: RunningJobs) -> dict[str, Any]:
        await running.wait()
        result: Any = await running.result()
        return self.form.whole(result)

    async def frames(
        self, running: RunningJobs, events: AsyncGenerator[IndexedEvent, None]
    ) -> AsyncGenerator[bytes, None]:
        async for _, event in events:
            yield b"".join(map(json_line, self.form.parts(event)))

    def error_frame(self, error: ApiError) -> bytes:
        return json_line({"error": error.message})


def parse_request(parsed: ParsedRequest, url: str, model: ModelView) -> OllamaRequest:
    """Parse a body. The job's payload validates the remaining parameters. Raises ApiError."""
    tier, is_stream = parsed.tier(), flag(parsed.body, "stream", default=True)
    members = {name: value for name, value in parsed.body.items() if name not in _GATEWAY_PARAMETERS}
    try:
        if url == CHAT:
            body = parse_chat(members)
        else:
            body = parse_generate(members, has_template="chat" in model["capabilities"])
    except InvalidJob as error:
        raise wrong(error, {}) from None
    params = {**body.params, "stream": is_stream, **parsed.params_of_caller()}
    if "max_tokens" not in params:
        params["max_tokens"] = within_limit(parsed.caller.max_tokens, rest_of_context(model, params))
    return OllamaRequest(
        model=parsed.name_of(model),
        body_of_job=body,
        params=params,
        tier=tier,
        names=body.names,
        is_stream=is_stream,
        form=AnswerForm(url, parsed.body["model"]),
        prompt_tokens=tokens_of(body.content, body.params.get("suffix", "")),
    )


async def chat(request: Request) -> Response:
    """Handle `POST /api/chat`."""
    return await _answer(await read_body(request), CHAT)


async def generate(request: Request) -> Response:
    """Handle `POST /api/generate`."""
    return await _answer(await read_body(request), GENERATE)


async def _answer(parsed: ParsedRequest, url: str) -> Response:
    model = await find_named(parsed.gateway, parsed.caller, parsed.body.get("model"))
    ollama_request = await parsed.read_by(parse_request, parsed, url, model)
    if ollama_request.body_of_job.content or "suffix" in ollama_request.params:
        return await run_jobs(parsed, ollama_request)
    form, is_unload = ollama_request.form, unloads(parsed.body.get("keep_alive"))
    if model.get("on_demand", False):
        now = await parsed.gateway.models(parsed.caller, 0.0) if is_unload else []
        if not is_unload or any(view["id"] == model["id"] and view["status"] == "ready" for view in now):
            await _touch(parsed, ollama_request)
        return JSONResponse(form.unloaded() if is_unload else form.loaded())
    if is_unload:
        raise ApiError(
            400,
            "keep_alive is 0, but requests can't unload a model, because other clients may be using the model; run "
            "`cellama models unload`",
        )
    return JSONResponse(form.loaded())


async def _touch(parsed: ParsedRequest, ollama_request: OllamaRequest) -> None:
    """Run a small job, which loads an on-demand model and sets its keep-alive time."""
    params = {name: value for name, value in ollama_request.params.items() if name == "keep_alive_s"}
    client, name, options = parsed.gateway.client, ollama_request.model, parsed.light_options
    await run_one(
        parsed,
        name,
        1,
        lambda key: client.tokenize(name, "load", idempotency_key=key, **options, **params),
        has_usage=False,
    )


ROUTES = (Route(CHAT, chat, methods=["POST"]), Route(GENERATE, generate, methods=["POST"]))
