"""The work that a call requests, as estimates count it, for any arguments of a plain producer."""

from __future__ import annotations

from typing import Any

import pytest

from cellama.tasks.state.ledger import JobWork, work_of, work_of_text


@pytest.mark.parametrize(
    ("task", "args", "kwargs", "work"),
    [
        ("generate", ["m", "Hi"], {}, JobWork("generate", 256)),
        ("generate", ["m", "Hi"], {"max_tokens": 8, "n": 3}, JobWork("generate", 24, 3)),
        ("generate", ["m", "Hi"], {"max_tokens": 8, "ignore_eos": True}, JobWork("generate", 8, is_exact=True)),
        ("generate", ["m", "Hi"], {"max_tokens": 8, "ignore_eos": True, "stop": ["."]}, JobWork("generate", 8)),
        ("chat", [], {"messages": [], "max_tokens": True, "n": -1}, JobWork("chat", 256)),
        ("embed", ["m", ["a", "b"]], {}, JobWork("embed", 2)),
        ("rerank", ["m"], {"query": "q", "documents": ("a", "b", "c")}, JobWork("rerank", 3)),
        ("chunk", ["m", [{}, {}]], {}, JobWork("chunk", 2, 2)),
        ("tokenize", ["m", "text"], {}, JobWork("tokenize")),
        ("unheard_of", [1, 2, 3], {"texts": 7}, JobWork("unheard_of")),
    ],
)
def test_work_of_a_call_is_its_number_of_tokens_or_texts(
    task: str, args: list[Any], kwargs: dict[str, Any], work: JobWork
) -> None:
    assert work_of(f"cellama.{task}", args, kwargs) == work
    assert work_of_text(work.text) == work


@pytest.mark.parametrize("text", ["", "generate", "generate x 1", "a b c d"])
def test_malformed_work_in_the_ledger_is_replaced_by_the_default(text: str) -> None:
    assert work_of_text(text) == JobWork("generate", 256)
