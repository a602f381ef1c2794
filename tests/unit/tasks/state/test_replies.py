"""A reply is found by the meaning of the conversation that leads to it, and only by this."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from fakeredis import FakeRedis

from cellama.tasks.state.replies import Conversation, ParentTurn, parent_turn

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


def test_reply_is_not_found_with_different_reasoning_tools_options_or_scopes(redis: FakeRedis) -> None:
    turns = [*HEAD, REPLY, RESULT]
    found = conversation([*HEAD, {**REPLY, "reasoning": "No."}, RESULT]).find(redis)
    assert (found.replies, found.edited) == ({}, 2)
    for other, cause in ((conversation(turns, tools=[]), "tools"), (conversation(turns, thinking=True), "options")):
        found = other.find(redis)
        assert (found.replies, other.change_since(found.latest)) == ({}, (cause, None))
    found = conversation(turns, scope="b").find(redis)
    assert (found.replies, found.latest) == ({}, None)


def after(redis: FakeRedis, messages: list[dict[str, Any]], key: str = KEY, tools: Any = TOOLS) -> Conversation:
    """Return the conversation of a job with a parent_key."""
    parent = parent_turn(redis, key)
    assert isinstance(parent, ParentTurn)
    return Conversation(("", "model"), options={}, tools=tools, messages=messages, parent=parent)


def test_reply_of_a_job_with_a_parent_key_is_found_in_the_whole_conversation(redis: FakeRedis) -> None:
    second, user = {"role": "assistant", "content": "Done.", "reasoning": "Ok."}, {"role": "user", "content": "And?"}
    third = {"role": "assistant", "content": "No."}
    for reply, parent, key in ((second, KEY, "cd" * 32), (third, "cd" * 32, "ef" * 32)):
        for name, value in after(redis, [RESULT] if parent == KEY else [user], parent).records([(reply, key)], None, 0):
            redis.set(name, value)
    turns = [*HEAD, REPLY, RESULT, second, user, third, user]
    renamed(turns := copy.deepcopy(turns))
    whole = conversation(turns)
    found = whole.find(redis)
    assert {end: reply.key for end, reply in found.replies.items()} == {3: KEY, 5: "cd" * 32, 7: "ef" * 32}
    assert found.latest is not None
    assert (found.latest.key, whole.change_since(found.latest)) == ("ef" * 32, ("expired", None))  # all parts are equal
    edited = conversation([*turns[:4], {**second, "reasoning": "Hm."}, *turns[5:]]).find(redis)
    assert (edited.replies.keys(), edited.edited) == ({3}, 4)


def test_reply_of_a_branch_does_not_replace_the_latest_context_of_the_conversation(redis: FakeRedis) -> None:
    for text, key in (("One.", "cd" * 32), ("Two.", "ef" * 32)):
        for name, value in after(redis, [RESULT]).records([({"role": "assistant", "content": text}, key)], None, 0):
            redis.set(name, value)
    latest = conversation(HEAD).find(redis).latest
    assert latest is not None
    assert latest.key == "cd" * 32


def test_reply_is_not_stored_when_its_job_has_different_tools_than_its_parent(redis: FakeRedis) -> None:
    reply = ({"role": "assistant", "content": "Done."}, "cd" * 32)
    assert after(redis, [RESULT]).records([reply], None, 0)
    assert after(redis, [RESULT], tools=[]).records([reply], None, 0) == []
    assert parent_turn(redis, "cd" * 32) is None


def test_reply_is_found_when_its_reasoning_and_text_are_joined() -> None:
    redis, user = FakeRedis(), {"role": "user", "content": "Why?"}
    cut = {"role": "assistant", "content": "", "reasoning": "Let me"}
    for message, key in (({**REPLY, "tool_calls": []}, KEY), (cut, "cd" * 32)):
        for name, value in conversation(HEAD).records([(message, key)], None, 0):
            redis.set(name, value)
    sent_back = ({"content": "Let me"}, cut, {"content": ""})  # the last client omits the reasoning
    for reply, key in (({"content": "Hm.Well."}, KEY), *((each, "cd" * 32) for each in sent_back)):
        found = conversation([*HEAD, {"role": "assistant", **reply}, user]).find(redis)
        assert {end: reply.key for end, reply in found.replies.items()} == {3: key}


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
