"""Explain how much of a job's prompt was reused, and where the prompt differs from the conversation's earlier turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from cellama.tasks.contract.errors import JobError, UnknownJob
from cellama.tasks.contract.events import DoneEvent, ReplayCause, ReplayFields, StartedEvent
from cellama.tasks.contract.journal import events_in
from cellama.tasks.contract.keys import journal_key, response_key
from cellama.tasks.contract.kinds.chat import TASK_CHAT
from cellama.tasks.contract.names import job_id_of_key
from cellama.tasks.state.contexts import read_context

NUM_SHOWN = 24  # tokens to show before and after the first difference, about two lines
NUM_LOST = 64  # tokens; smaller parts of a common prefix are not reused because copying them takes as long
TTL_S = 3600  # seconds that contexts are kept after they were explained
_RESPONSE = "resp_"  # ids of responses, whose records contain the job id
_ANSWERS = ("msg_", "chatcmpl-")  # ids of other answers of the gateway: a prefix and the job id

REASONS: dict[ReplayCause, str] = {
    "options": "a variable of the chat template changed, such as enable_thinking",
    "tools": "the tools changed",
    "system": "the system message changed",
    "reply": "the client changed the reply of the assistant",
    "message": "this message differs from the earlier request",
    "expired": "the record of the reply has expired (result_ttl_s), so the chat template rendered it again",
    "unknown": "no earlier turn of this conversation is known for this model and cache scope",
    "disabled": "the setting replay_replies is false, so the chat template rendered the replies again",
    "no_room": "the earlier turns with their reasoning would leave too little room in the slot, so the chat template "
    "rendered them again",
    "template": "the chat template can't render these messages after the reply, so it rendered all of them again",
}
EVICTED = "the KV state of the other common tokens was evicted, or is on another worker"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which a prompt differs from an earlier context, with the surrounding text.

    Each text is None if no worker could convert its tokens into text.
    """

    token: int
    common: str | None
    earlier: str | None
    prompt: str | None


@dataclass(frozen=True, slots=True)
class CacheExplanation:
    """The tokens that a job reused from earlier contexts, and the reasons why it did not reuse more tokens."""

    job_id: str
    model: str
    prompt_tokens: int
    reused_tokens: int
    tier: str | None  # device (a slot), ram or disk
    replayed_messages: int  # first messages of the chat whose tokens were those of the earlier turns
    cause: ReplayCause | None  # why the prompt does not continue the latest turn of its conversation
    message: int | None  # index of the first message that differs
    common_tokens: int | None  # tokens that the prompt shares with the latest turn; None if it has expired
    difference: Difference | None
    reasons: tuple[str, ...]


TextOf = Callable[[str, list[int]], str]  # returns the text of tokens of a model


def explain(redis: Redis, job_id: str, text_of: TextOf) -> CacheExplanation:
    """Explain the cache use of a finished job, which is identified by its own id or its answer's id.

    Raises UnknownJob.
    """
    job_id = _job_of(redis, job_id)
    started, done = _ends_of(redis, job_id)
    usage, replay = done["usage"], started.get("replay", ReplayFields())
    cause, message = replay.get("cause"), replay.get("message")
    earlier = _tokens(redis, replay.get("latest") or replay.get("key"))
    prompt = _tokens(redis, done.get("finish_key"))
    common = difference = None
    if earlier is not None and prompt is not None:
        prompt = prompt[: usage["prompt_tokens"]]
        common = _num_common(earlier, prompt)
        if common < min(len(earlier), len(prompt)):
            difference = _difference(text_of, started["model"], common, earlier, prompt)
    reasons = [] if cause is None else [REASONS[cause]]
    if common is not None and common - usage["cached_tokens"] > NUM_LOST:
        reasons.append(EVICTED)
    return CacheExplanation(
        job_id=job_id,
        model=started["model"],
        prompt_tokens=usage["prompt_tokens"],
        reused_tokens=usage["cached_tokens"],
        tier=usage.get("cache_tier"),
        replayed_messages=replay.get("messages", 0),
        cause=cause,
        message=message,
        common_tokens=common,
        difference=difference,
        reasons=tuple(reasons),
    )


def _job_of(redis: Redis, named: str) -> str:
    """Return a job's id, given the job's own id or the id of a gateway answer.

    A response that was not stored is found only if its request had neither an API key nor a `cache_salt`.
    """
    if named.startswith(_RESPONSE):
        record: Any = redis.get(response_key(named))
        return job_id_of_key(TASK_CHAT, "", named) if record is None else str(json.loads(record)["job_id"])
    return next((named.removeprefix(prefix) for prefix in _ANSWERS if named.startswith(prefix)), named)


def _ends_of(redis: Redis, job_id: str) -> tuple[StartedEvent, DoneEvent]:
    """Return a job's first and last events."""
    key = journal_key(job_id)
    first: Any = redis.xrange(key, count=1)
    last: Any = redis.xrevrange(key, count=1)
    events = events_in([*first, *last])
    if not events or events[0]["type"] != "started" or events[-1]["type"] != "done":
        raise UnknownJob(
            f"job {job_id} can't be explained: it is unknown, has not finished, or its events have expired; explain a "
            "job within event_ttl_s after the job has finished"
        )
    return events[0], events[-1]


def _tokens(redis: Redis, key: str | None) -> Sequence[int] | None:
    context = None if key is None else read_context(redis, key, "", TTL_S)
    return None if context is None else context.tokens


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)


def _difference(text_of: TextOf, model: str, token: int, earlier: Sequence[int], prompt: Sequence[int]) -> Difference:
    parts = (
        prompt[max(0, token - NUM_SHOWN) : token],
        earlier[token : token + NUM_SHOWN],
        prompt[token : token + NUM_SHOWN],
    )
    return Difference(token, *(_text(text_of, model, list(part)) for part in parts))


def _text(text_of: TextOf, model: str, tokens: list[int]) -> str | None:
    try:
        return text_of(model, tokens) if tokens else ""
    except JobError:
        return None
