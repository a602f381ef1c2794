"""Hashes of growing prefixes of prompts."""

from __future__ import annotations

from typing import Any

import pytest

from cellama.tasks.contract.prefixes import HASH_CHARS, MIN_BYTES, hash_of_context, prefixes_of

QUEUE = "cellama:queue:tiny"


def hashes(task: str = "generate", queue: str = QUEUE, **parameters: Any) -> list[str]:
    text = prefixes_of(f"cellama.{task}", queue, ["tiny"], parameters)
    return [text[start : start + HASH_CHARS] for start in range(0, len(text), HASH_CHARS)]


def num_shared(one: list[str], other: list[str]) -> int:
    return len(set(one) & set(other))


def length_of(found: str) -> int:
    return int(found[:4], 16) * 64


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(texts)]


def test_texts_share_the_hashes_of_at_least_two_thirds_of_their_common_prefix() -> None:
    for common in (800, 3000, 20_000, 200_000):
        one, other = hashes(prompt="a" * common + "b" * 300), hashes(prompt="a" * common + "c" * 900)
        shared = [each for each in one if each in other]
        assert common * 2 / 3 - 64 <= length_of(shared[-1]) <= common
        assert one[: len(shared)] == shared


def test_short_prompts_have_no_hashes() -> None:
    assert hashes(prompt="a" * (MIN_BYTES - 1)) == []
    assert hashes("chat", messages=messages("Hi")) == []


def test_next_turn_has_the_hashes_of_all_messages_before_it() -> None:
    history = messages("a" * 700, "b" * 90, "c" * 50)
    following = [*history, *messages("d" * 80, "e" * 70)]
    assert hashes("chat", messages=history)[-1] in hashes("chat", messages=following)


def test_first_message_alone_does_not_make_conversations_similar() -> None:
    system = "s" * 5000
    one, other = (hashes("chat", system=system, messages=messages(text * 3000)) for text in "ab")
    assert 0 < num_shared(one, other) < len(one)
    assert one[-1] != other[-1]


@pytest.mark.parametrize(
    "parameters", [{"cache_scope": "acme"}, {"adapters": [["pirate", 1.0]]}, {"queue": "cellama:queue:other"}]
)
def test_hashes_differ_between_scopes_adapters_and_models(parameters: dict[str, Any]) -> None:
    assert num_shared(hashes(prompt="a" * 2000), hashes(prompt="a" * 2000, **parameters)) == 0


def test_tools_are_part_of_the_prefix() -> None:
    tools = [{"type": "function", "function": {"name": "search"}}]
    history = messages("a" * 900)
    assert num_shared(hashes("chat", messages=history), hashes("chat", messages=history, tools=tools)) == 0


def test_job_with_a_parent_key_has_the_hash_of_its_context() -> None:
    key = "0123456789abcdef" * 4
    assert hashes(prompt="x", parent_key=key) == [hash_of_context(key)]
    assert len(hash_of_context(key)) == HASH_CHARS


def test_bulk_slice_has_the_hashes_of_its_first_line() -> None:
    lines = [{"kind": "generate", "params": {"prompt": "a" * 900}}, {"kind": "generate", "params": {"prompt": "b"}}]
    assert hashes("chunk", lines=lines) == hashes(prompt="a" * 900)


def test_token_prompts_have_hashes() -> None:
    assert num_shared(hashes(prompt=list(range(400))), hashes(prompt=[*range(300), 7])) > 0


@pytest.mark.parametrize(
    "parameters",
    [{"prompt": 7}, {"messages": [{1, 2}] * 600}, {"lines": [3]}, {"lines": []}, {"prompt": "\ud800" * 600}],
)
def test_invalid_calls_do_not_raise(parameters: dict[str, Any]) -> None:
    assert len(hashes(**parameters)) <= 24
    assert hashes("unknown", **parameters) == hashes(**parameters)


def test_number_of_hashes_is_limited() -> None:
    many = hashes("chat", messages=messages(*["a" * 9000] * 200))
    assert len(many) <= 24
    assert many == sorted(many, key=length_of)
