"""Parameters of vLLM and llama-server, from plain jobs and through the gateway."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from cellama.api.client.client import Client
from cellama.tasks.contract.errors import InvalidJob

from ...conftest import PATIENCE_S
from .conftest import CHAT

QUESTION = CHAT["messages"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 30}


def answer(openai: OpenAI, **body: Any) -> tuple[str, int]:
    """Return the text of a chat, and its number of tokens."""
    reply = openai.chat.completions.create(**{**CHAT, "max_tokens": 30}, extra_body=body)
    assert reply.usage is not None
    return reply.choices[0].message.content or "", reply.usage.completion_tokens


def test_answer_has_at_least_the_minimum_number_of_tokens(openai: OpenAI, queue: Client) -> None:
    text, num_tokens = answer(openai)
    assert num_tokens < 20
    longer = queue.chat("tiny", QUESTION, min_tokens=20, stop=text[:4], **GREEDY).result(PATIENCE_S)
    assert longer["usage"]["completion_tokens"] >= 20
    assert longer["text"].startswith(text[:4])
    assert answer(openai, min_tokens=20, stop=text[:4]) == (longer["text"], longer["usage"]["completion_tokens"])
    with pytest.raises(InvalidJob, match="min_tokens is 31, but max_tokens is 30; lower min_tokens"):
        queue.chat("tiny", QUESTION, min_tokens=31, **GREEDY)


def test_stop_token_ends_the_answer_and_is_included_if_requested(openai: OpenAI, queue: Client) -> None:
    text, num_tokens = answer(openai)
    tokens = queue.chat("tiny", QUESTION, return_tokens=True, **GREEDY).result(PATIENCE_S)["tokens"]
    stop = {"stop_token_ids": [tokens[3]]}
    assert tokens[3] not in tokens[:3]
    before, num_before = answer(openai, **stop)
    included, num_included = answer(openai, **stop, include_stop_str_in_output=True)
    assert text.startswith(included)
    assert included.startswith(before)
    assert (num_before, num_included) == (3, 4)
    assert num_tokens > 4
    with pytest.raises(BadRequestError, match="stop_token_ids: token 1000000 does not exist"):
        answer(openai, stop_token_ids=[10**6])


@pytest.mark.parametrize(
    "filters",
    [
        {"top_n_sigma": 1e-6, "temperature": 3},
        {"temperature": 0.5, "dynatemp_range": 0.5, "dynatemp_exponent": 100},
        {"top_p": 0, "temperature": 3},
        {"top_k": 1.0, "temperature": 3, "seed": -7, "typ_p": 1.0, "repetition_penalty": 1},
    ],
)
def test_llama_server_sampling_filters_apply_to_chats(openai: OpenAI, filters: dict[str, Any]) -> None:
    assert answer(openai, **{"top_k": -1, **filters}) == answer(openai)


def test_vllm_constraints_apply_to_chats(openai: OpenAI) -> None:
    for body in ({"guided_choice": ["yes", "no (a)"]}, {"structured_outputs": {"choice": ["yes", "no (a)"]}}):
        assert answer(openai, **body)[0] in ("yes", "no (a)")
    assert answer(openai, guided_grammar='root ::= "ab" "c"')[0] == "abc"
    assert answer(openai, guided_regex="[0-9]{3}")[0].isdecimal()
    assert answer(openai, max_tokens=-1) == answer(openai)
