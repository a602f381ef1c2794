"""Results and events match their public types."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter

from cellama.engine import (
    Completion,
    Finished,
    Text,
    Timings as EngineTimings,
    TokenLogprob,
    ToolCallDelta,
    Usage as EngineUsage,
)
from cellama.engine.events import CacheHitKind as EngineCacheHitKind, FinishReason as EngineFinishReason
from cellama.engine.text.formats.calls import ParsedToolCall as EngineToolCall
from cellama.tasks import ChatResult, Event, GenerateResult, Timings, Usage
from cellama.tasks.contract import events
from cellama.tasks.contract.events import ending_of_late
from cellama.tasks.contract.kinds.chat import TASK_CHAT, with_messages
from cellama.tasks.contract.kinds.generate import TASK_GENERATE
from cellama.tasks.contract.shapes.results import CacheHitKind, FinishReason
from cellama.tasks.publishing.results import MAX_WARNING_CHARS, MAX_WARNINGS, event_of, result_of
from cellama.tasks.worker.signing import Signer

SIGNER = Signer("a secret")


def check(kind: Any, value: Any) -> None:
    """Raises ValidationError for a key or a value that the type does not have."""
    TypeAdapter(kind).validate_python(value, strict=True, extra="forbid")


def completion(**more: Any) -> Completion:
    usage, timings = EngineUsage(3, 2), EngineTimings(1.0, 2.0, 3.0, None, 4.0)
    given = {"text": "Hi", "tokens": (1, 2), "finish_reason": "stop", "usage": usage, "timings": timings, "slot": 0}
    return Completion(**{**given, "stop_sequence": None, "seed": 7, **more})


LOGPROBS = (TokenLogprob(1, -0.5, ((1, -0.5), (2, -0.9))),)
COMPLETIONS = [
    completion(),
    completion(slot=None, finish_reason="timeout"),
    completion(logprobs=LOGPROBS, alternatives=(completion(index=1),)),
    completion(warnings=("a",)),
    completion(context_tokens=(5, 6, 7, 1, 2), alternatives=(completion(index=1),)),
]


def test_counts_and_timings_equal_the_values_of_the_engine() -> None:
    assert Usage.__annotations__.keys() == {*(field.name for field in fields(EngineUsage)), "cache_hit_kind"}
    assert Timings.__optional_keys__ == {field.name for field in fields(EngineTimings)}
    assert get_args(FinishReason) == get_args(EngineFinishReason)


@pytest.mark.parametrize("done", COMPLETIONS)
def test_generation_result_matches_its_type(done: Completion) -> None:
    check(GenerateResult, result_of(done, "tiny", SIGNER.sign, "job"))


def test_result_has_token_ids_when_requested() -> None:
    asked = result_of(COMPLETIONS[-1], "tiny", SIGNER.sign, "job")
    assert (asked["tokens"], asked["context_tokens"]) == ([1, 2], [5, 6, 7, 1, 2])
    assert [choice["tokens"] for choice in asked["choices"]] == [[1, 2], [1, 2]]
    assert not {"tokens", "context_tokens"} & result_of(COMPLETIONS[0], "tiny", SIGNER.sign, "job").keys()


def test_result_and_last_event_contain_warnings_of_limited_length() -> None:
    many = tuple(f"{number}: {'x' * 1000}" for number in range(2000))
    warned = completion(warnings=many)
    shown = result_of(warned, "tiny", SIGNER.sign, "job")["warnings"]
    assert event_of(Finished("job", warned, None), "tiny", "worker", SIGNER.sign, "job")["warnings"] == shown  # type: ignore[typeddict-item]
    assert shown[-1] == f"and {2000 - MAX_WARNINGS} more"
    assert len(str(shown)) < MAX_WARNINGS * (MAX_WARNING_CHARS + 10)
    assert "warnings" not in result_of(COMPLETIONS[0], "tiny", SIGNER.sign, "job")


@pytest.mark.parametrize(("cached", "kind"), [(0, "cold"), (1, "partial"), (2, "exact"), (3, "exact")])
def test_result_reports_cached_prompt_tokens(cached: int, kind: str) -> None:
    done = completion(usage=EngineUsage(3, 2, cached))
    assert result_of(done, "tiny", SIGNER.sign, "job")["cache_hit_kind"] == kind
    assert get_args(CacheHitKind) == get_args(EngineCacheHitKind)


def test_reasoning_signature_covers_the_conversation_before_it() -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    signature = SIGNER.after(turns).sign("so")
    same = [turns[0], {**turns[1], "reasoning": None, "tool_calls": None}]
    assert SIGNER.after(same).verifies("so", signature)
    others = ([], turns[1:], turns[::-1], [*turns, turns[1]], [turns[0], {**turns[1], "content": "Ho"}])
    assert not any(SIGNER.after(other).verifies("so", signature) for other in others)
    assert not SIGNER.after(turns).verifies("no", signature)
    assert not Signer("another").after(turns).verifies("so", signature)
    assert Signer("").after(turns).sign("so") == Signer(None).after(turns).sign("so") == ""


def test_changed_signed_message_is_detected() -> None:
    turns: list[dict[str, str]] = [{"role": "user", "content": "Hi"}]
    for thought in ("so", "or so"):
        signature = SIGNER.after(turns).sign(thought)
        turns += [{"role": "assistant", "content": "Ho", "reasoning": thought, "signature": signature}, turns[0]]
    assert SIGNER.first_wrong(turns) is None
    assert SIGNER.first_wrong([turns[0], {**turns[1], "reasoning": ""}, *turns[2:]]) == 1
    assert SIGNER.first_wrong([*turns[:2], {"role": "user", "content": "He"}, *turns[3:]]) == 3
    assert SIGNER.first_wrong([turns[0], {**turns[1], "signature": "\u00fc"}]) == 1
    assert Signer(None).first_wrong(turns) == 1


def test_chat_result_matches_its_type() -> None:
    calls = (EngineToolCall("look", "{}"),)
    for done in (*COMPLETIONS, completion(reasoning="so", tool_calls=calls)):
        check(ChatResult, with_messages(result_of(done, "tiny", SIGNER.sign, "job")))


def test_result_without_an_attempt_matches_its_type() -> None:
    check(GenerateResult, ending_of_late(TASK_GENERATE)[1])
    check(ChatResult, ending_of_late(TASK_CHAT, "Hi", 2)[1])


def test_events_match_their_types() -> None:
    text = Text("job", "Hi", (1,), index=1, logprobs=LOGPROBS, mirostat_mu=2.0)
    calls = (EngineToolCall("look", "{}"),)
    pieces = Text("job", "", (2,), calls=(ToolCallDelta(0, "look"), ToolCallDelta(0, arguments="{}")))
    for event in (text, pieces, Finished("job", completion(tool_calls=calls, warnings=("a",)), None)):
        check(Event, events.numbered(event_of(event, "tiny", "worker", SIGNER.sign, "job"), 3))


def test_call_has_the_same_id_in_its_pieces_in_the_last_event_and_in_the_result() -> None:
    alternative = completion(index=1, tool_calls=(EngineToolCall("look", "{}"), EngineToolCall("see", "{}")))
    whole = completion(tool_calls=(EngineToolCall("look", "{}"),), alternatives=(alternative,))
    result: Any = result_of(whole, "tiny", SIGNER.sign, "job")
    ids = [[call["id"] for call in choice["tool_calls"]] for choice in result["choices"]]
    assert len({*ids[0], *ids[1]}) == 3
    deltas = (ToolCallDelta(0, "look", "{}"), ToolCallDelta(1, "see"))
    for index, of_choice in enumerate(ids):
        sent: Any = event_of(Text("job", "", (), index, calls=deltas[: len(of_choice)]), "m", "w", SIGNER.sign, "job")
        assert [delta["id"] for delta in sent["tool_call_deltas"]] == of_choice
    done: Any = event_of(Finished("job", whole), "m", "w", SIGNER.sign, "job")
    assert [call["id"] for call in done["tool_calls"]] == ids[0]
    assert ids[0] != [call["id"] for call in event_of(Finished("job", whole), "m", "w", SIGNER.sign, "b")["tool_calls"]]  # type: ignore[typeddict-item]


def test_event_starts_with_its_seq() -> None:
    assert list(events.numbered(events.error("dead", "…"), 3)) == ["seq", "type", "code", "message", "retryable"]


def test_reasoning_signature_covers_the_parent_key() -> None:
    question: Any = {"role": "user", "content": "Hi"}
    one, other = "0" * 64, "1" * 64
    signature = SIGNER.after([question], one).sign("so")
    said: Any = [question, {"role": "assistant", "content": "Ho", "reasoning": "so", "signature": signature}]
    assert SIGNER.first_wrong(said, one) is None
    assert SIGNER.first_wrong(said, other) == SIGNER.first_wrong(said) == 1
    said[1]["signature"] = SIGNER.after([question]).sign("so")
    assert (SIGNER.first_wrong(said), SIGNER.first_wrong(said, one)) == (None, 1)
