"""Tests of texts without spaces in vocabularies with recursive expressions: they fit into the stack or are rejected."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest

from cellama.bench.models.synthetic import Shape, write_model
from cellama.engine import InvalidRequest
from cellama.engine.llama import LlamaModel
from cellama.engine.llama.pretokenizers import ITERATIVE, MAX_RUN, MAX_SUPERBPE_DIGITS, PreTokenizer

SIZES: dict[str, Any] = {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_head_kv": 2, "n_ff": 64, "n_vocab": 320}
RECURSIVE = ("gpt-4o", "tekken", "deepseek-v3", "default", "jais-2", "bloom", "exaone-moe", "superbpe")
SMALL_STACK = 8 << 20  # bytes, the size for most threads


@dataclass(frozen=True)
class Named(Shape):
    pre: str = "default"

    def add_tokenizer(self, writer: gguf.GGUFWriter) -> None:
        super().add_tokenizer(writer)
        writer.kv_data[-1]["tokenizer.ggml.pre"].value = self.pre


def vocabulary(folder: Path, pre: str) -> LlamaModel:
    write_model(folder / "m.gguf", Named(**SIZES, pre=pre), file_type="F32")
    return LlamaModel(folder / "m.gguf", vocab_only=True)


def in_small_stack(work: Any) -> Any:
    """Return the result of a function that runs in a thread with a stack of the usual size."""
    found: list[Any] = []
    before = threading.stack_size(SMALL_STACK)
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    threading.stack_size(before)
    thread.join()
    return found[0]


@pytest.mark.parametrize("pre", RECURSIVE)
@pytest.mark.parametrize("part", ["a", "字", "=", "a ", " ", "\n"])
def test_longest_supported_unbroken_run_fits_on_the_stack(tmp_path: Path, pre: str, part: str) -> None:
    model = vocabulary(tmp_path, pre)
    text = part * (MAX_RUN // 2 // len(part))
    tokens = in_small_stack(lambda: model.tokenize(text))
    assert b"".join(map(model.token_bytes, tokens)).decode() == text
    model.close()


@pytest.mark.parametrize(
    ("pre", "text"),
    [
        ("gpt-4o", "a" * 2_000_000),
        ("tekken", "A" * 150_000),
        ("deepseek-v3", "字" * 150_000),
        ("default", "1" * 150_000),
        ("jais-2", " " * 150_000),
        ("deepseek-v3", "=" * 60_000 + "\r\n" * 30_000),
        ("gpt-4o", "=" * 60_000 + "/\n" * 30_000),
        ("jais-2", "\u2003 " * 75_000),
        ("exaone-moe", "a b " * 50_000),
        ("bloom", "a1=\x1c" * 50_000),
        ("a-later-one", "a" * 150_000),
        ("superbpe", "1" * (MAX_SUPERBPE_DIGITS + 1)),
    ],
)
def test_unbroken_run_beyond_the_limit_is_rejected(pre: str, text: str) -> None:
    def work() -> None:
        pytest.fail("it was tokenized")

    with pytest.raises(
        InvalidRequest, match=rf"unbroken run of about \d+ .*\({pre}\) supports .* insert spaces or line"
    ):
        PreTokenizer(pre).run(text, work)


@pytest.mark.parametrize("pre", ["gpt-4o", "deepseek-v3", "jais-2", "default"])
def test_long_text_with_breaks_is_tokenized(pre: str) -> None:
    lines = '{"name": "value", "número": [1,2,3]}\n' * 50_000
    minified = '{"name":"value","x":[1,2.5,-3]},' * 50_000
    base64 = "aGVsbG8gd29ybGQ9/x+A1" * 50_000
    for text in (lines, minified, base64):
        assert PreTokenizer(pre).run(text, lambda: True)


def test_common_vocabularies_accept_unbroken_runs_of_any_length(tmp_path: Path) -> None:
    model = vocabulary(tmp_path, "gpt-2")
    assert "gpt-2" in ITERATIVE
    assert len(in_small_stack(lambda: model.tokenize("a" * 500_000))) == 500_000
    model.close()
    assert not PreTokenizer(None).recurses  # a vocabulary that is not byte-level has no expressions
    assert PreTokenizer("").recurses
