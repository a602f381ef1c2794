"""Find the contexts of earlier replies from the conversation that a client sends back.

A stateless client sends each reply back in its own format: the reasoning is missing, and the arguments of tool calls
have been parsed and serialized again. So the chat template would render tokens that differ from the tokens that the
model generated. When a chat ends, its worker therefore stores the `finish_key` of the context under a digest of the
conversation. A later chat that continues the same conversation in the same cache scope continues this context
(attempt/replay.py).

The digest covers the meaning of each message. The digest ignores the reasoning, the whitespace around a reply, the ids
of calls, and the key order and spacing in call arguments. The digest also ignores arguments that equal the defaults in
the tool's schema, because Claude Code adds such arguments to the calls that it sends back. The reasoning is stored
separately: a client may omit it, but can't change it. The context is also found if a client joins a reply's reasoning
and text.

In a chat with a `parent_key`, the messages continue a context. A later request may send the whole conversation instead.
So that the reply is found in this case as well, each context has a record with the digest of the conversation up to its
end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from cellama.tasks.contract.events import ReplayCause
from cellama.tasks.contract.keys import latest_reply_key, reply_key, turn_key

VERSION = 2  # of digests and records; later versions don't find the records of earlier ones
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
class ParentTurn:
    """The conversation up to the end of a context, which the messages of a job with this `parent_key` continue."""

    setup: bytes  # digest of the conditions, options and tools
    state: bytes  # digest of the setup and of all messages
    latest_key: str  # Redis key of the conversation's latest context
    reasoning: tuple[str, ...]  # as in StoredReply
    num_calls: int  # in the conversation
    calls: Mapping[str, int]  # the numbers of the last reply's calls, by their ids
    parts: tuple[str, ...] | None = None  # as in LatestReply, if this context is the latest one

    def pack(self) -> bytes:
        """Return the value to store in Redis."""
        fields = [self.setup.hex(), self.state.hex(), self.latest_key, self.reasoning, self.num_calls, self.calls]
        return json.dumps(fields, separators=(",", ":")).encode()


def parent_turn(redis: Redis, key: str) -> ParentTurn | None:
    """Return the conversation that ends with a finish_key's context, or None if the conversation is not stored."""
    value: Any = redis.get(turn_key(key))
    if not value:
        return None
    setup, state, latest_key, reasoning, num_calls, calls = json.loads(value)
    stored: Any = redis.get(latest_key)
    latest = _latest(stored)
    return ParentTurn(
        bytes.fromhex(setup),
        bytes.fromhex(state),
        latest_key,
        tuple(reasoning),
        num_calls,
        calls,
        parts=latest.parts if latest is not None and latest.key == key else None,
    )


@dataclass(frozen=True, slots=True)
class Found:
    """The stored replies of a conversation, keyed by the number of messages up to and including each reply."""

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
        parent: ParentTurn | None = None,
    ) -> None:
        """Compute the digests.

        `conditions` contains everything else that contexts must have in common, such as the cache scope and the model.
        `options` and `tools` are the variables that the chat template receives. `messages` continue the conversation of
        `parent`.
        """
        self._parent = parent
        self._defaults = _defaults_of(tools)
        base = _digest_of([VERSION, *conditions])
        self._setup = _after(base, _digest_of([options, list(tools)]))
        self._calls = dict(parent.calls) if parent else {}
        self._num_calls = parent.num_calls if parent else 0
        lines = [self._line_of(message) for message in messages]
        self._roles = [str(message["role"]) for message in messages]
        self._reasoning = [_reasoning_of(message) for message in messages]
        self._last = messages[-1] if messages else {}
        self._states = [parent.state if parent else self._setup]
        for line in lines:
            self._states.append(_after(self._states[-1], line))
        user = next((line for line, role in zip(lines, self._roles, strict=True) if role == "user"), b"")
        self._latest_key = parent.latest_key if parent else latest_reply_key(_after(base, user).hex())
        setup = (_short(_digest_of(options)), _short(_digest_of(list(tools))))
        self._before = parent.parts if parent else setup  # parts before the messages
        self._parts = tuple(role[0] + _short(line) for role, line in zip(self._roles, lines, strict=True))

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
        keys = [reply_key(self._states[end].hex()) for end in ends]
        values: Any = redis.mget([*keys, self._latest_key])
        replies = {end: reply for end, value in zip(ends, values, strict=False) if (reply := _stored(value))}
        edited = [end for end, reply in replies.items() if not self._keeps_reasoning(reply, end)]
        return Found(
            {end: reply for end, reply in replies.items() if end not in edited},
            _latest(values[-1]),
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
        which contains the first `num_replayed` messages. A reply without text, calls and reasoning is not stored.
        """
        if self._parent is not None and self._parent.setup != self._setup:
            return []
        num_messages = len(self._roles)
        started = ""
        if self._last.get("role") == "assistant":  # the reply continues this message
            if self._last.get("tool_calls"):
                return []
            num_messages -= 1
            started = str(self._last.get("content") or "")
        first = replayed or self._parent
        before = (*(first.reasoning if first else ()), *self._reasoning_of_replies(num_messages, num_replayed))
        state = self._states[num_messages]
        records: dict[str, bytes] = {}
        for message, key in replies:
            reply = {**message, "content": started + (message.get("content") or "")}
            if not any((reply["content"].strip(), reply.get("tool_calls"), _reasoning_of(reply))):
                continue
            line = self._line_of_reply(reply)
            joined = self._line_of_reply({**reply, "content": f"{reply.get('reasoning') or ''}{reply['content']}"})
            stored = StoredReply(key, (*before, _reasoning_of(reply)))
            records |= {reply_key(_after(state, each).hex()): stored.pack() for each in (line, joined)}
            records[turn_key(key)] = ParentTurn(
                setup=self._setup,
                state=_after(state, line),
                latest_key=self._latest_key,
                reasoning=stored.reasoning,
                num_calls=self._num_calls + len(reply.get("tool_calls") or ()),
                calls=self._numbers_of(reply),
            ).pack()
            if self._before is not None and self._latest_key not in records:
                parts = (*self._before, *self._parts[:num_messages], "a" + _short(line))
                records[self._latest_key] = LatestReply(key, parts).pack()
        return list(records.items())

    def change_since(self, latest: LatestReply | None) -> tuple[ReplayCause, int | None]:
        """Return why the latest context can't be continued, and the index of the first changed message, if any.

        If options, tools and messages are all unchanged, the reason is that the record of the reply has expired.
        """
        if latest is None:
            return "unknown", None
        parts = (*(self._before or ()), *self._parts)
        for index, (now, before) in enumerate(zip(parts, latest.parts, strict=False)):
            if now != before:
                if index < len(_SETUP):
                    return _SETUP[index], None
                return _CHANGED.get(now[0], "message"), index - len(_SETUP)
        return "expired", None

    def _line_of(self, message: Mapping[str, Any]) -> bytes:
        """Return the digest of a message's meaning. If the message is a reply, also number its tool calls."""
        if message["role"] == "assistant":
            self._calls |= self._numbers_of(message)
            self._num_calls += len(message.get("tool_calls") or ())
            return self._line_of_reply(message)
        call = message.get("tool_call_id")
        content = str(message.get("content") or "")
        return _digest_of([message["role"], content, message.get("name"), self._calls.get(str(call), call)])

    def _line_of_reply(self, reply: Mapping[str, Any]) -> bytes:
        """Return the digest of a reply's meaning."""
        calls = []
        for call in reply.get("tool_calls") or ():
            name, arguments = call["function"]["name"], _arguments_of(call["function"].get("arguments"))
            calls.append([name, _without(self._defaults.get(name, {}), arguments)])
        return _digest_of(["assistant", str(reply.get("content") or "").strip(), calls])

    def _numbers_of(self, reply: Mapping[str, Any]) -> dict[str, int]:
        """Return the numbers of a reply's tool calls within the conversation, keyed by call id."""
        calls = enumerate(reply.get("tool_calls") or (), self._num_calls)
        return {str(call["id"]): number for number, call in calls if call.get("id") is not None}


def _after(state: bytes, line: bytes) -> bytes:
    """Return the digest of a conversation after one more message."""
    return hashlib.sha256(state + line).digest()


def _latest(value: bytes | None) -> LatestReply | None:
    if not value:
        return None
    key, *parts = value.decode().split(" ")
    return LatestReply(key, tuple(parts))


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
    """Return the arguments of a call without arguments that are equal to their defaults."""
    if not defaults or not isinstance(arguments, dict):
        return arguments
    return {name: value for name, value in arguments.items() if defaults.get(name) != _digest_of(value)}


def _plain(value: Any) -> Any:
    """Normalize a JSON value so that 1.0 equals 1, because JavaScript writes both numbers in the same way."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _digest_of(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


def _short(digest: bytes) -> str:
    return digest.hex()[:SHORT_DIGITS]
