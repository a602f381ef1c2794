"""What a body orders: calls of the client, and how their answer is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cellama.api.http.allowance import count, rest_of_context, tokens_of, within_limit
from cellama.api.http.asking import Asked, flag
from cellama.api.http.errors import ApiError, wrong
from cellama.api.openai.bodies import params_of_body
from cellama.api.openai.parameters import CHAT, COMPLETIONS, PARAMETERS, Rule
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import shorten
from cellama.tasks.contract.shapes.workers import ModelView

MAX_PROMPTS = 128  # of one request: a job and a stream for each
TEXT_TOKENS = 16  # of a text that does not say how many, as at OpenAI's
KINDS = {CHAT: "chat", COMPLETIONS: "generate"}
_OURS = ("stream", "stream_options", "service_tier", "cache_salt")


@dataclass(frozen=True, slots=True)
class Order:
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


def order_of(asked: Asked, url: str, model: ModelView) -> Order:
    """The order of a body, but for what only a job's payload checks. Raises ApiError."""
    body = asked.body
    tier = asked.tier()
    is_stream, include_usage = _stream(body)
    own = {name: value for name, value in body.items() if name not in _OURS}
    try:
        params = params_of_body(url, own)
    except InvalidJob as error:
        raise wrong(url, error) from None
    for name, instead in (("priority", "service_tier"), ("cache_scope", "cache_salt")):
        if name in params:
            raise ApiError(400, f"{name} can't be given here; use {instead}", param=name)
    del params["model"]
    content = params.pop("messages" if url == CHAT else "prompt")
    params |= {"stream": is_stream, **asked.params_of_caller()}
    contents = _contents(content, url)
    if "max_tokens" not in params:
        most = TEXT_TOKENS if url == COMPLETIONS else rest_of_context(model, params)
        num_answers = len(contents) * count(params.get("n"), 1)
        params["max_tokens"] = within_limit(asked.caller.max_tokens, most, num_answers)
    num_read = tokens_of(*contents)
    return Order(url, asked.name_of(model), contents, params, tier, is_stream, include_usage, num_read)


def rules_for(body: Mapping[str, Any], url: str) -> dict[str, Rule]:
    """Return the rules by which this body calls things: one that uses a job's own name calls it by that."""
    return {name: rule for name, rule in PARAMETERS[url].items() if rule.to not in body}


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
