"""How many tokens a request may take, as far as that is known before its jobs run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellama.config import limits
from cellama.tasks.contract.shapes.workers import ModelView

CHARS_PER_TOKEN = 4  # about
LEAST_TOKENS = 16  # of a model that says nothing of its context
PARTS_OF_LIMIT = 4


def tokens_of(*contents: Any) -> int:
    """About. Token ids count as themselves: the first entry of a list says whether the list has them."""
    num_chars, left = 0, list(contents)
    while left:
        content = left.pop()
        if isinstance(content, str):
            num_chars += len(content)
        elif isinstance(content, Mapping):
            num_chars += CHARS_PER_TOKEN * len(content) + sum(map(len, map(str, content)))
            left.extend(content.values())
        elif not isinstance(content, list | tuple):
            num_chars += CHARS_PER_TOKEN
        elif content and isinstance(content[0], int):
            num_chars += CHARS_PER_TOKEN * len(content)
        else:
            num_chars += CHARS_PER_TOKEN * len(content)
            left.extend(content)
    return num_chars // CHARS_PER_TOKEN


def count(value: Any, default: int) -> int:
    """A number of the body, which the job's payload may refuse later."""
    return value if type(value) is int and value > 0 else default


def rest_of_context(model: ModelView, params: Mapping[str, Any]) -> int:
    """What an answer may have that does not say how much: the context, or as many tokens as logprobs allow."""
    per_token = count(params.get("n"), 1) * (count(params.get("logprobs"), 0) + 1)
    most = limits.MAX_REPORTED // per_token if "logprobs" in params else limits.MAX_COUNT
    return max(1, min(model.get("ctx_per_slot") or LEAST_TOKENS, most))


def within_limit(limit: int | None, most: int, num_answers: int = 1) -> int:
    """Tokens of each answer where the request says nothing: all together at most a part of the caller's limit, so that
    one request does not take it alone."""
    if limit is None:
        return most
    return max(1, min(most, limit // PARTS_OF_LIMIT // num_answers))
