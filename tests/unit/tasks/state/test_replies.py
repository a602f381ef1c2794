"""A reply is found by the meaning of the conversation that leads to it, and only by this."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from fakeredis import FakeRedis

from cellama.tasks.state.replies import Conversation

KEY = "ab" * 32
CALL: dict[str, Any] = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "read", "arguments": '{"path": "a.py", "line": 1}'},
}
HEAD: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
REPLY: dict[str, Any] = {"role": "assistant", "content": "Well.", "reasoning": "Hm.", "tool_calls": [CALL]}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "call00001", "content": "ok"}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "deep": {"type": "boolean", "default": False}}}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}]


def conversation(messages: list[dict[str, Any]], scope: str = "", tools: Any = TOOLS, **options: Any) -> Conversation:
    return Conversation((scope, "model"), options=options, tools=tools, messages=messages)


@pytest.fixture
def redis() -> FakeRedis:
    """A Redis with the records of a reply."""
    redis = FakeRedis()
    for name, value in conversation(HEAD).records([(REPLY, KEY)], None, 0):
        redis.set(name, value)
    return redis


def arguments(text: str) -> Callable[[Any], None]:
    return lambda turns: turns[2]["tool_calls"][0]["function"].update(arguments=text)


def renamed(turns: Any) -> None:
    turns[2]["tool_calls"][0]["id"] = turns[3]["tool_call_id"] = "toolu_1"


SAME: dict[str, Callable[[Any], object]] = {
    "unchanged": lambda turns: None,
    "arguments in another order": arguments('{"line":1,"path":"a.py"}'),
    "a number as JavaScript writes it": arguments('{"path": "a.py", "line": 1.0}'),
    "the default of an argument": arguments('{"path": "a.py", "line": 1, "deep": false}'),
    "an escaped letter": arguments('{"p\\u0061th": "a.py", "line": 1}'),
    "no reasoning": lambda turns: turns[2].pop("reasoning"),
    "space around the text": lambda turns: turns[2].update(content=" Well.\n"),
    "other ids": renamed,
}
CHANGED: dict[str, tuple[Callable[[Any], object], str, int | None]] = {
    "text": (lambda turns: turns[2].update(content="Well!"), "reply", 2),
    "arguments": (arguments('{"path": "a.py", "line": 2}'), "reply", 2),
    "not the default of an argument": (arguments('{"path": "a.py", "line": 1, "deep": 0}'), "reply", 2),
    "no calls": (lambda turns: turns[2].pop("tool_calls"), "reply", 2),
    "user": (lambda turns: turns[1].update(content="Ho"), "unknown", None),  # another conversation
    "system": (lambda turns: turns[0].update(content="Be long."), "system", 0),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_reply_is_found_when_its_meaning_is_unchanged(redis: FakeRedis, change: Callable[[Any], object]) -> None:
    turns = copy.deepcopy([*HEAD, REPLY, RESULT])
    change(turns)
    found = conversation(turns).find(redis)
    assert ({end: reply.key for end, reply in found.replies.items()}, found.edited) == ({3: KEY}, None)


@pytest.mark.parametrize(("change", "cause", "message"), CHANGED.values(), ids=CHANGED)
def test_reply_is_not_found_when_the_conversation_changed(
    redis: FakeRedis, change: Callable[[Any], object], cause: str, message: int | None
) -> None:
    turns = copy.deepcopy([*HEAD, REPLY, RESULT])
    change(turns)
    changed = conversation(turns)
    found = changed.find(redis)
    assert (found.replies, changed.change_since(found.latest)) == ({}, (cause, message))


def test_reply_is_not_found_with_other_reasoning_tools_options_or_scopes(redis: FakeRedis) -> None:
    turns = [*HEAD, REPLY, RESULT]
    found = conversation([*HEAD, {**REPLY, "reasoning": "No."}, RESULT]).find(redis)
    assert (found.replies, found.edited) == ({}, 2)
    for other, cause in ((conversation(turns, tools=[]), "tools"), (conversation(turns, thinking=True), "options")):
        found = other.find(redis)
        assert (found.replies, other.change_since(found.latest)) == ({}, (cause, None))
    found = conversation(turns, scope="b").find(redis)
    assert (found.replies, found.latest) == ({}, None)


def test_reasoning_of_every_earlier_reply_is_compared(redis: FakeRedis) -> None:
    second = {"role": "assistant", "content": "Done."}
    turns = [*HEAD, {**REPLY, "reasoning": None}, RESULT]
    now = conversation(turns)
    for name, value in now.records([(second, "cd" * 32)], now.find(redis).replies[3], 3):
        redis.set(name, value)
    more = [RESULT, second, {"role": "user", "content": "And?"}]
    assert conversation([*HEAD, REPLY, *more]).find(redis).replies.keys() == {3, 5}
    edited = conversation([*HEAD, {**REPLY, "reasoning": "No."}, *more]).find(redis)
    assert (edited.replies, edited.edited) == ({}, 2)


def test_continued_reply_is_stored_with_its_start_and_an_empty_reply_is_not_stored() -> None:
    start = {"role": "assistant", "content": "Well"}
    whole = conversation([*HEAD, {"role": "assistant", "content": "Well, yes."}, {"role": "user", "content": "Why?"}])
    redis = FakeRedis()
    for name, value in conversation([*HEAD, start]).records(
        [({"role": "assistant", "content": ", yes."}, KEY)], None, 0
    ):
        redis.set(name, value)
    assert whole.find(redis).replies[3].key == KEY
    assert conversation(HEAD).records([({"role": "assistant", "content": " "}, KEY)], None, 0) == []


def test_expired_reply_is_explained_when_nothing_has_changed(redis: FakeRedis) -> None:
    now = conversation([*HEAD, REPLY, RESULT])
    latest = now.find(redis).latest
    assert now.change_since(latest) == ("expired", None)
    assert latest is not None
    assert json.dumps(latest.pack().decode()).count(" ") == len(HEAD) + 3
