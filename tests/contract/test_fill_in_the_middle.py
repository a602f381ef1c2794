"""Prompts for the text between a prefix and a suffix, in llama-server's format."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cellama.engine import InvalidRequest, Tokenizer

from ..fim_model import FIM_TOKENS, write_fim_model

PRE, SUF, MID, REP, SEP = FIM_TOKENS.values()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    path = tmp_path_factory.mktemp("model") / "fim.gguf"
    write_fim_model(path)
    with Tokenizer(str(path)) as tokenizer:
        yield tokenizer


def test_prompt_contains_prefix_and_suffix_after_their_infill_tokens(tokenizer: Tokenizer) -> None:
    def plain(text: str) -> list[int]:
        return tokenizer.tokenize(text, add_special=False)

    first = tokenizer.tokenize("")
    tokens = tokenizer.fill_in_the_middle("Once", "the end")
    assert tokens == [*first, PRE, *plain("Once"), SUF, *plain("the end"), MID]
    assert tokenizer.fill_in_the_middle(plain("Once"), "the end") == tokens
    assert tokenizer.fill_in_the_middle("", "") == [*first, PRE, SUF, MID]
    files = [("a.py", "x = 1"), ("b.py", "y = 2")]
    assert tokenizer.fill_in_the_middle("Once", "the end", files) == [
        *first, REP, *plain("myproject\n"),
        SEP, *plain("a.py\n"), *plain("x = 1"), SEP, *plain("b.py\n"), *plain("y = 2"),
        SEP, *plain("filename\n"), *tokens[len(first) :],
    ]  # fmt: skip


def test_model_without_infill_tokens_rejects_a_suffix() -> None:
    with (
        Tokenizer("bundled://tiny") as tiny,
        pytest.raises(InvalidRequest, match="has no fill-in-the-middle tokens"),
    ):
        tiny.fill_in_the_middle("Once", "the end")
