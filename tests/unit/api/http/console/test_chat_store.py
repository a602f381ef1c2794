"""The messages, the title and the size of a chat."""

from __future__ import annotations

import pytest

from cellama.api.http.console.chat_store import MAX_CHAT_BYTES, ChatTurn, ConsoleChat
from cellama.api.http.errors import ApiError


def turn(text: str, answer: str = "", **fields: object) -> ChatTurn:
    return ChatTurn.model_validate({"text": text, "model": "tiny", "job_id": "a", "answer": answer, **fields})


def test_messages_exclude_turns_without_an_answer() -> None:
    turns = (turn("Hi", "Hello"), turn("Tell more", status="failed"), turn("And?", "No", status="stopped"))
    chat = ConsoleChat(id="c", turns=turns, system="Be brief")
    assert [message["content"] for message in chat.messages()] == ["Be brief", "Hi", "Hello", "And?", "No"]
    assert [message["role"] for message in chat.messages()] == ["system", *["user", "assistant"] * 2]


def test_title_consists_of_one_short_line() -> None:
    assert ConsoleChat(id="c").title == ""
    assert ConsoleChat(id="c", turns=(turn(" What\n is\tit? "),)).title == "What is it?"
    assert len(ConsoleChat(id="c", turns=(turn("long " * 100),)).title) == 60


def test_only_the_last_turn_is_running() -> None:
    chat = ConsoleChat(id="c", turns=(turn("Hi"),))
    assert chat.running == chat.turns[0]
    assert chat.with_last(turn("Hi", "Hello", status="done")).running is None
    assert chat.without_last().running is None


def test_oversized_chat_is_rejected_with_its_size_and_the_limit() -> None:
    chat = ConsoleChat(id="c").with_turn(turn("x", "y" * (MAX_CHAT_BYTES - 1000), status="done"))
    assert chat.with_turn(turn("z")).turns[-1].text == "z"
    with pytest.raises(ApiError, match=rf"limit is {MAX_CHAT_BYTES}; start a new chat") as refused:
        chat.with_turn(turn("z" * 2000))
    assert (refused.value.status, refused.value.code) == (413, "chat_too_large")
