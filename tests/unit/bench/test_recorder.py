"""The recorder of the benchmarks reads the usage in the answers of each API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cellama.bench.peers.recorder import Exchange

CHAT = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 7}}
RESPONSE = {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 7}}
MESSAGE = {"input_tokens": 2, "cache_read_input_tokens": 7, "output_tokens": 0}


def frames(*events: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events)


@pytest.mark.parametrize(
    "answer",
    [
        json.dumps({"usage": CHAT}),
        frames({"choices": [], "usage": None}, {"choices": [], "usage": CHAT}) + "data: [DONE]\n\n",
        frames({"response": {"usage": None}}, {"response": {"usage": RESPONSE}}),
        frames({"message": {"usage": MESSAGE}}, {"type": "message_delta", "usage": {"output_tokens": 2}}),
    ],
    ids=["chat", "streamed chat", "response", "message"],
)
def test_usage_counts_the_tokens_of_the_whole_prompt(answer: str) -> None:
    assert Exchange("POST", "/", {}, {}, 200, answer).usage == (9, 7, 2)
    with pytest.raises(KeyError):
        Exchange("POST", "/", {}, {}, 200, "{}").usage  # noqa: B018
