"""What a body orders: a call of the client, and how its answer is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cellama.api.anthropic.answers import NO_THREADS
from cellama.api.anthropic.bodies import Ordered, counted, in_anthropics_words, ordered
from cellama.api.http.allowance import tokens_of
from cellama.api.http.asking import Asked, flag
from cellama.api.http.errors import ApiError
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.shapes.workers import ModelView

_OURS = ("stream", "service_tier", "cache_salt")
_INSTEAD = {"priority": "service_tier", "cache_scope": "cache_salt"}


@dataclass(frozen=True, slots=True)
class Order:
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


def in_our_words(asked: Asked) -> Asked:
    """The request with Anthropic's tier under the name that all endpoints know."""
    if asked.body.get("service_tier") != "standard_only":
        return asked
    return replace(asked, body={**asked.body, "service_tier": "default"})


def order_of(asked: Asked, model: ModelView) -> Order:
    """The order of a body, but for what only a job's payload checks. Raises ApiError."""
    tier, is_stream = asked.tier(), flag(asked.body, "stream")
    for name, instead in _INSTEAD.items():
        if name in asked.body:
            raise ApiError(400, f"{name} can't be given here; use {instead}", param=name)
    try:
        order = ordered(_own(asked))
    except InvalidJob as error:
        raise wrong(error, asked.body) from None
    params = {**order.params, "stream": is_stream, **asked.params_of_caller()}
    num_read = tokens_of(order.messages)
    return Order(asked.name_of(model), order.messages, params, tier, is_stream, order.shows_thoughts, num_read)


def count_of(asked: Asked) -> tuple[Ordered, int]:
    """What is to be counted, and about how many tokens that are. Raises ApiError."""
    try:
        order = counted(asked.body)
        return order, tokens_of(order.messages)
    except InvalidJob as error:
        raise wrong(error, asked.body) from None


def wrong(error: InvalidJob, body: Mapping[str, Any]) -> ApiError:
    """What is wrong with the body, under Anthropic's names."""
    told = in_anthropics_words(str(error), body)
    return ApiError(400, told, code=NO_THREADS if told.startswith("thread is ") else None)


def of_worker(error: ApiError, body: Mapping[str, Any]) -> ApiError:
    """Return what a worker found wrong with the body, under Anthropic's names. Other errors stay as they are."""
    if error.code != "invalid_request":
        return error
    return ApiError(error.status, in_anthropics_words(error.message, body), code=error.code)


def _own(asked: Asked) -> dict[str, Any]:
    return {name: value for name, value in asked.body.items() if name not in _OURS}
