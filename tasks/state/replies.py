"""Find the contexts of earlier replies by the conversation that a client sends back.

A stateless client sends each reply back in its own format: the reasoning is missing, and the arguments of tool calls
have been parsed and serialized again. So the chat template would render different tokens from those the model
generated. At the end of a chat, its worker therefore stores the `finish_key` of the context under a digest of the
conversation. A later chat that continues the same conversation in the same cache scope continues this context
(attempt/replay.py).

The digest covers the meaning of each message. It ignores the reasoning, the whitespace around a reply, the ids of
calls, and the order of keys and the spacing in their arguments. It also ignores arguments that are equal to the default
in the schema of the tool, because Claude Code adds them to the calls that it sends back. The reasoning is stored
separately: a client may omit it, but can't change it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from cellama.tasks.contract.events import ReplayCause
from cellama.tasks.contract.keys import latest_reply_key, reply_key

VERSION = 1  # of digests and records; later versions don't find the records of earlier ones
MAX_REPLIES = 256  # replies of one conversation to look for, starting with the last one
_SETUP: tuple[ReplayCause, ...] = ("options", "tools")  # the first parts of a conversation; its messages follow
_CHANGED: dict[str, ReplayCause] = {"s": "system", "a": "reply"}  # by the initial of the role
SHORT_DIGITS = 8  # of digests that are only compared within one conversation


@dataclass(frozen=True, slots=True)
class StoredReply:
    """The context that ends with a reply."""

    key: str  # finish_key
    reasoning: tuple[str, ...]  # short digest of the reasoning of each reply in the context; "" without reasoning

    def pack(self) -> bytes:
        """Return the value to store in Redis."""
        return f"{self.key} {','.join(self.reasoning)}".encode()


@dataclass(frozen=True, slots=True)
class LatestReply:
    """The last context of a conversation, with short digests of everything that its prompt contained."""

    key: str  # finish_key
    parts: tuple[str, ...]  # options, tools, then each message with the initial of its role

    def pack(self) -> bytes:
        """Return the value to store in Redis."""
        return " ".join((self.key, *self.parts)).encode()


@dataclass(frozen=True, slots=True)
class Found:
    """The stored replies of a conversation, by the number of messages up to and including each reply."""

    replies: Mapping[int, StoredReply]
    latest: LatestReply | None = None
    edited: int | None = None  # index of the first reply whose reasoning the client has changed


class Conversation:
    """The messages of a chat, with the digests under which its replies are stored."""

    def __init__(
        self,
        conditions: Sequence[object],
        *,
        options: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        messages: Sequence[Mapping[str, Any]],
    ) -> None:
        """Compute the digests.

        `conditions` contains everything else that contexts must have in common, such as the cache scope and the model.
        `options` and `tools` are the variables that the chat template receives.
        """
        self._defaults = _defaults_of(tools)
        self._calls: dict[str, int] = {}
        self._num_calls = 0
        base = _digest_of([VERSION, *conditions])
        self.parts = [_short(_digest_of(options)), _short(_digest_of(list(tools)))]
        lines = [self._line_of(message) for message in messages]
        self._roles = [str(message["role"]) for message in messages]
        self._reasoning = [_reasoning_of(message) for message in messages]
        self._last = messages[-1] if messages else {}
        user = next((line for line, role in zip(lines, self._roles, strict=True) if role == "user"), b"")
        self._latest_key = latest_reply_key(hashlib.sha256(base + user).hexdigest())
        hasher = hashlib.sha256(base + _digest_of([options, list(tools)]))
        self._hashers = [hasher.copy()]
        for role, line in zip(self._roles, lines, strict=True):
            hasher.update(line)
            self._hashers.append(hasher.copy())
            self.parts.append(role[0] + _short(line))

    @property
    def has_replies(self) -> bool:
        """Return whether any messages follow a reply."""
        return "assistant" in self._roles[:-1]

    @property
    def last_reply(self) -> int:
        """Return the number of messages up to and including the last reply that other messages follow."""
        return max(end for end, role in enumerate(self._roles[:-1], 1) if role == "assistant")

    def find(self, redis: Redis) -> Found:
        """Return the stored replies of this conversation. Replies whose reasoning was changed are omitted."""
        ends = [end for end, role in enumerate(self._roles[:-1], 1) if role == "assistant"][-MAX_REPLIES:]
        keys = [reply_key(self._hashers[end].hexdigest()) for end in ends]
        values: Any = redis.mget([*keys, self._latest_key])
        replies = {end: reply for end, value in zip(ends, values, strict=False) if (reply := _stored(value))}
        latest = values[-1].decode().split(" ") if values[-1] else []
        edited = [end for end, reply in replies.items() if not self._keeps_reasoning(reply, end)]
        return Found(
            {end: reply for end, reply in replies.items() if end not in edited},
            LatestReply(latest[0], tuple(latest[1:])) if latest else None,
            edited[0] - 1 if edited else None,
        )

    def repeated(self, found: Found, key: str, end: int) -> dict[int, StoredReply]:
        """Return the reply that an earlier attempt replayed, even if another reply has replaced its record."""
        reply = found.replies.get(end)
        if reply is None or reply.key != key:
            reply = StoredReply(key, tuple(self._reasoning_of_replies(end)))
        return {end: reply}

    def _keeps_reasoning(self, reply: StoredReply, end: int) -> bool:
        given = self._reasoning_of_replies(end)
        return len(given) == len(reply.reasoning) and all(
            not digest or digest == kept for digest, kept in zip(given, reply.reasoning, strict=True)
        )

    def _reasoning_of_replies(self, end: int, start: int = 0) -> list[str]:
        messages = zip(self._roles[start:end], self._reasoning[start:end], strict=True)
        return [reasoning for role, reasoning in messages if role == "assistant"]

    def records(
        self, replies: Iterable[tuple[Mapping[str, Any], str]], replayed: StoredReply | None, num_replayed: int
    ) -> list[tuple[str, bytes]]:
        """Return the pairs of Redis key and value to store when the next replies are complete.

        `replies` are messages with the finish_key of their contexts. The contexts start with the context of `replayed`,
        which contains the first `num_replayed` messages. A reply that contains neither text nor calls is not stored.
        """
        num_messages = len(self._roles)
        started = ""
        if self._last.get("role") == "assistant":  # the reply continues this message
            if self._last.get("tool_calls"):
                return []
            num_messages -= 1
            started = str(self._last.get("content") or "")
        before = () if replayed is None else replayed.reasoning
        before = (*before, *self._reasoning_of_replies(num_messages, num_replayed))
        records: list[tuple[str, bytes]] = []
        for message, key in replies:
            whole = {**message, "content": started + (message.get("content") or "")}
            if not whole["content"].strip() and not whole.get("tool_calls"):
                continue
            line = self._line_of(whole)
            hasher = self._hashers[num_messages].copy()
            hasher.update(line)
            stored = StoredReply(key, (*before, _reasoning_of(whole)))
            records.append((reply_key(hasher.hexdigest()), stored.pack()))
            if len(records) == 1:
                parts = (*self.parts[: num_messages + len(_SETUP)], "a" + _short(line))
                records.append((self._latest_key, LatestReply(key, parts).pack()))
        return records

    def change_since(self, latest: LatestReply | None) -> tuple[ReplayCause, int | None]:
        """Return why the latest context of this conversation can't be continued, and the index of the message.

        If nothing in the messages explains it, there is no record of the reply: it has expired, or the reply belongs to
        a job with a `parent_key`. Such a job contains only the new messages.
        """
        if latest is None:
            return "unknown", None
        for index, (now, before) in enumerate(zip(self.parts, latest.parts, strict=False)):
            if now != before:
                if index < len(_SETUP):
                    return _SETUP[index], None
                return _CHANGED.get(now[0], "message"), index - len(_SETUP)
        return "expired", None

    def _line_of(self, message: Mapping[str, Any]) -> bytes:
        """Return the digest of a message's meaning."""
        content = str(message.get("content") or "")
        if message["role"] != "assistant":
            call = message.get("tool_call_id")
            return _digest_of([message["role"], content, message.get("name"), self._calls.get(str(call), call)])
        calls = []
        for call in message.get("tool_calls") or ():
            if call.get("id") is not None:
                self._calls[str(call["id"])] = self._num_calls
            self._num_calls += 1
            name, arguments = call["function"]["name"], _arguments_of(call["function"].get("arguments"))
            calls.append([name, _without(self._defaults.get(name, {}), arguments)])
        return _digest_of(["assistant", content.strip(), calls])


def _stored(value: bytes | None) -> StoredReply | None:
    if not value:
        return None
    key, _, reasoning = value.decode().partition(" ")
    return StoredReply(key, tuple(reasoning.split(",")))


def _reasoning_of(message: Mapping[str, Any]) -> str:
    reasoning = str(message.get("reasoning") or "").strip()
    return _short(_digest_of(reasoning)) if reasoning else ""


def _arguments_of(arguments: Any) -> Any:
    """Return the arguments of a call as a JSON value, or as text if they are not valid JSON."""
    if not isinstance(arguments, str):
        return _plain(arguments or {})
    try:
        return _plain(json.loads(arguments or "{}"))
    except (ValueError, RecursionError):
        return arguments.strip()


def _defaults_of(tools: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, bytes]]:
    """Return digests of the default values of each function's arguments."""
    defaults = dict[str, dict[str, bytes]]()
    for tool in tools:
        function = tool["function"]
        properties = (function.get("parameters") or {}).get("properties")
        members = properties.items() if isinstance(properties, dict) else ()
        defaults[function["name"]] = {
            name: _digest_of(_plain(schema["default"]))
            for name, schema in members
            if isinstance(schema, dict) and "default" in schema
        }
    return defaults


def _without(defaults: Mapping[str, bytes], arguments: Any) -> Any:
    """Return arguments, omitting arguments that are equal to their defaults."""
    if not defaults or not isinstance(arguments, dict):
        return arguments
    return {name: value for name, value in arguments.items() if defaults.get(name) != _digest_of(value)}


def _plain(value: Any) -> Any:
    """Normalize a JSON value so that 1.0 equals 1, because JavaScript writes both in the same way."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _digest_of(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


def _short(digest: bytes) -> str:
    return digest.hex()[:SHORT_DIGITS]
