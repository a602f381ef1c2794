"""The endpoint POST /infill, which generates the text between a prefix and a suffix in llama-server's format."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cellama.api.client.async_client import AsyncClient
from cellama.api.openai.bodies import params_of_body
from cellama.api.openai.other_servers import UNLIMITED
from cellama.api.openai.parameters import COMPLETIONS, PARAMETERS, callers_names
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import shorten
from cellama.tasks.contract.names import DEFAULT_MODEL
from cellama.tasks.contract.shapes.workers import ModelView

from .errors import ApiError, wrong
from .parsing import ParsedRequest, flag, read, rest_of_context, tokens_of, within_limit
from .running import Call, IndexedEvent, JobsRequest, RunningJobs, run_jobs
from .sse import frame

_OWN = ("input_prefix", "input_suffix", "input_extra", "prompt", "model", "stream", "service_tier", "cache_salt")
_NAMES = {"suffix": "input_suffix", "prompt": "input_prefix"}  # parameters of jobs → names in this endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillRequest(JobsRequest):
    """A request for the text between a prefix and a suffix. One job generates the text."""

    prefix: str

    def calls(self, client: AsyncClient) -> list[Call]:
        submit: Any = client.generate
        return [lambda key: submit(self.model, self.prefix, wait=True, idempotency_key=key, **self.params)]

    def refusal(self, error: InvalidJob) -> ApiError:
        return wrong(error, self.names)

    async def body(self, running: RunningJobs) -> dict[str, Any]:
        await running.wait()
        result: Any = await running.result()
        return {"content": result["text"], **_ending(result, result["model"])}

    async def frames(
        self, running: RunningJobs, events: AsyncGenerator[IndexedEvent, None]
    ) -> AsyncGenerator[bytes, None]:
        async for index, event in events:
            if event["type"] == "ping":
                yield await running.keep_alive(index)
            elif event["type"] == "token":
                yield frame({"content": event["text"], "tokens": event["tokens"], "stop": False})
            elif event["type"] == "done":
                yield frame({"content": "", **_ending(event, self.model)})

    def error_frame(self, error: ApiError) -> bytes:
        return frame(error.envelope)


def _ending(end: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the final fields of an answer, such as its stop type, based on the job's result or last event."""
    word, usage = end.get("stop_sequence"), end["usage"]
    kind = "limit" if end["finish_reason"] != "stop" else "eos" if word is None else "word"
    return {
        "stop": True,
        "model": model,
        "stop_type": kind,
        "stopping_word": word or "",
        "truncated": False,
        "tokens_predicted": usage["completion_tokens"],
        "tokens_evaluated": usage["prompt_tokens"],
        "tokens_cached": usage["cached_tokens"],
    }


def parse_infill(parsed: ParsedRequest, model: ModelView) -> InfillRequest:
    """Parse a body. The job's payload validates the remaining parameters. Raises ApiError."""
    body = parsed.body
    prefix, prompt, suffix = (_text(body, name) for name in ("input_prefix", "prompt", "input_suffix"))
    others = {name: value for name, value in body.items() if name not in _OWN}
    if body.get("input_extra") is not None:
        others["input_extra"] = body["input_extra"]
    names = callers_names(PARAMETERS[COMPLETIONS], body) | _NAMES
    try:
        params = params_of_body(COMPLETIONS, {**others, "prompt": prefix + prompt})
    except InvalidJob as error:
        raise wrong(error, names) from None
    if params.get("max_tokens") in (None, UNLIMITED):
        params["max_tokens"] = within_limit(parsed.caller.max_tokens, rest_of_context(model, params))
    del params["prompt"]
    is_stream = flag(body, "stream")
    return InfillRequest(
        model=DEFAULT_MODEL if body.get("model") is None else parsed.name_of(model),
        prefix=prefix + prompt,
        params={**params, "suffix": suffix, "stream": is_stream, **parsed.params_of_caller()},
        tier=parsed.tier(),
        names=names,
        is_stream=is_stream,
        prompt_tokens=tokens_of(prefix, prompt, suffix, body.get("input_extra") or []),
    )


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if value is None and name == "prompt":
        return ""
    if not isinstance(value, str):
        raise ApiError(400, f"{name} is {shorten(value)}; it must be a string, which may be empty", param=name)
    return value


async def infill(request: Request) -> Response:
    """Handle `POST /infill`. If `model` is missing, the default model is used."""
    parsed = await read(request)
    model = await parsed.gateway.find_model(parsed.caller, parsed.body.get("model") or DEFAULT_MODEL)
    return await run_jobs(parsed, await parsed.read_by(parse_infill, parsed, model))


ROUTES = (Route("/infill", infill, methods=["POST"]),)
