"""Continue a chat after the tokens of its earlier replies, instead of rendering them again (tasks/state/replies.py).

The prompt then starts with all tokens that the model read and wrote in the earlier turns, so the KV state of these
tokens is reused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from cellama.engine import InvalidRequest, Model, Request, TemplateFailed, UnknownKey
from cellama.tasks.contract.events import ReplayCause, ReplayFields
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.publishing.publisher import Reply
from cellama.tasks.state.history import Provenance
from cellama.tasks.state.replies import Conversation, Found, StoredReply, parent_turn
from cellama.tasks.worker.signing import conversation_of

from .engine_request import RequestExtras, parent_tokens, request_of

if TYPE_CHECKING:
    from cellama.tasks.worker.runtime import Runtime

T = TypeVar("T")

MIN_ROOM = 0.25  # share of a slot that a replayed context must leave; otherwise, the shorter rendered prompt is used
MAX_TEMPLATE_FAILURES = 2  # replies to try, because a template that fails after one reply probably fails after all


class RetryRedis(Protocol):
    """Calls a function repeatedly until Redis answers, and returns the function's result."""

    def __call__(self, action: Callable[[], T], /) -> T: ...


class ChatReplay:
    """The earlier replies in a chat, and the records to store with the chat's next reply."""

    def __init__(self, runtime: Runtime, model: Model, job: ChatJob, provenance: Provenance) -> None:
        """Compute the digests of the conversation. Raises WrongCapability, TemplateFailed and InvalidRequest."""
        model.require("chat")
        self.fields: ReplayFields | None = None  # for the `started` event; None if no message follows a reply
        self._runtime = runtime
        self._model = model
        self._job = job
        self._first = provenance.replay  # of the first attempt, which later attempts repeat
        self._replayed: StoredReply | None = None
        self._num_replayed = 0  # messages in the replayed context, including the system message of the options
        messages, options = conversation_of(job)
        conversation = options.all_of(messages)
        self._num_added = len(conversation) - len(messages)
        template = hashlib.sha256((job.chat_template or model.template.source).encode()).hexdigest()
        self._conversation_after = partial(
            Conversation,
            (job.cache_scope, provenance.model, template, provenance.adapters),
            options={name: value for name, value in options.variables.items() if name != "tools"},
            tools=options.offered,
            messages=conversation,
        )
        self._conversation: Conversation | None = None

    def request(self, extras: RequestExtras, retry_redis: RetryRedis) -> Request:
        """Return the engine request for the chat, and set `fields`. Raises the errors of `request_of`."""
        redis, settings, key = self._runtime.redis, self._runtime.settings, self._job.parent_key
        if key is not None:
            parent = retry_redis(lambda: parent_turn(redis, key))
            if parent is not None:
                self._conversation = self._conversation_after(parent=parent)
            return self._rendered(extras)
        conversation = self._conversation = self._conversation_after()
        if not conversation.has_replies:
            return self._rendered(extras)
        found = retry_redis(lambda: conversation.find(redis))
        cause, message = conversation.change_since(found.latest) if found.edited is None else ("reply", found.edited)
        replies = found.replies
        if not settings.replay_replies:
            replies, cause, message = {}, "disabled", None
        if self._first is not None:  # later attempts repeat the choice of the first attempt
            first, end = self._first.get("key"), self._first.get("messages", 0) + self._num_added
            replies = {} if first is None else conversation.repeated(found, first, end)
        num_failures = 0
        for end in sorted(replies, reverse=True):
            try:
                request = self._after(replies[end], end, extras)
            except UnknownKey:
                cause, message = "expired", None
                continue
            except (TemplateFailed, InvalidRequest):  # if the chat itself is invalid, rendering all of it also fails
                cause, message, num_failures = "template", None, num_failures + 1
                if num_failures == MAX_TEMPLATE_FAILURES:
                    break
                continue
            if not self._has_room(request):
                cause, message = "no_room", None
                break
            self._replayed, self._num_replayed = replies[end], end
            self.fields = {"key": replies[end].key, "messages": end - self._num_added}
            if end != conversation.last_reply:
                self.fields |= self._explained(found, cause, message)
            return request
        self.fields = self._explained(found, cause, message)
        return self._rendered(extras)

    def records_of(self, replies: Sequence[Reply]) -> list[tuple[str, bytes]]:
        """Return the records to store when the next replies are complete."""
        if self._conversation is None:
            return []
        return self._conversation.records(replies, self._replayed, self._num_replayed)

    def _rendered(self, extras: RequestExtras) -> Request:
        return request_of(self._model, self._job, extras, self._runtime.signer)

    def _after(self, reply: StoredReply, end: int, extras: RequestExtras) -> Request:
        parent = parent_tokens(self._runtime, self._model, reply.key, self._job.cache_scope, extras.adapters)
        return self._rendered(replace(extras, parent=parent, num_replayed=end - self._num_added))

    def _has_room(self, request: Request) -> bool:
        size = self._model.ctx_per_slot
        return size is None or self._first is not None or len(request.prompt) <= (1 - MIN_ROOM) * size

    def _explained(self, found: Found, cause: ReplayCause, message: int | None) -> ReplayFields:
        fields: ReplayFields = {"cause": cause}
        if found.latest is not None:
            fields["latest"] = found.latest.key
        if message is not None and message >= self._num_added:
            fields["message"] = message - self._num_added
        return fields
