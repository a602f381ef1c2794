"""Tests that grammars allow the same tokens as llama.cpp, except for control tokens and bytes that are not UTF-8."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from random import Random
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
import pytest

from cellama.engine import EngineOptions, Model, ModelManager
from cellama.engine.grammar.grammars import GrammarSpec
from cellama.engine.llama import LlamaModel

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama.h: llama_token_data
NARROW = {0xE0, 0xED, 0xF0, 0xF4}  # not all bytes are valid UTF-8 after these, and llama.cpp allows all
JSON = r"""
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ( pair ("," ws pair)* )? "}"
pair ::= string ":" ws value
array ::= "[" ( value ("," ws value)* )? "]"
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" ( ["\\/bfnrt] | "u" [0-9a-fA-F]{4} ) ){0,20} "\""
number ::= "-"? ( "0" | [1-9] [0-9]{0,15} ) ( "." [0-9]{1,5} )?
ws ::= " "?
"""
GRAMMARS = [
    'root ::= "The " animal " said: " [0-9]{2} "." \n animal ::= "fox" | "bear" | "fo" [a-z]',
    "root ::= [^a-m]+ [é-ü]? .*",
    'root ::= ("a" | "b" root "b" | [cd]){1,3} " "*',
    'root ::= line{2,} \n line ::= "- " [^\\n"]* "\\n"',
    "root ::= [\\x20-\\x7E]{3,40} | [\\u4e00-\\u9fff]+ | [\\U0001F600-\\U0001F64F]",
    'root ::= (("x" | "y")? "z"+){0,4} ".\\"\\\\"',
    JSON + "root ::= object",
    JSON + "root ::= array",
]


@pytest.fixture(scope="module")
def weights() -> Iterator[LlamaModel]:
    manager = ModelManager()
    model: Model = manager.load("tiny", "bundled://tiny", options=EngineOptions(n_parallel=1, threads=1))
    yield model._weights
    manager.close()


class Theirs:
    """llama.cpp's grammar sampler."""

    def __init__(self, weights: LlamaModel, text: str) -> None:
        self._size = weights.info.n_vocab
        self._sampler: Any = lib.llama_sampler_init_grammar(weights.vocab, text.encode(), b"root")
        assert self._sampler

    def allows(self) -> np.ndarray[Any, Any]:
        candidates = np.zeros(self._size, CANDIDATE)
        candidates["id"] = np.arange(self._size)
        pointer = candidates.ctypes.data_as(lib.llama_token_data_p)
        array = lib.llama_token_data_array(data=pointer, size=self._size, selected=-1, sorted=False)
        lib.llama_sampler_apply(self._sampler, ctypes.byref(array))
        allowed: np.ndarray[Any, Any] = candidates["logit"] > -np.inf
        return allowed

    def accept(self, token: int) -> None:
        lib.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        lib.llama_sampler_free(self._sampler)


def is_shown(weights: LlamaModel, token: int) -> bool:
    piece = weights.token_bytes(token)
    return weights.is_end(token) or (bool(piece) and max(piece) < 0xF5 and not {0xC0, 0xC1} & set(piece))


@pytest.mark.parametrize("text", GRAMMARS, ids=range(len(GRAMMARS)))
@pytest.mark.parametrize("seed", range(3))
def test_grammar_allows_the_same_tokens_as_llama_cpp(weights: LlamaModel, text: str, seed: int) -> None:
    random, grammars = Random(seed), weights.grammars
    theirs, ours = Theirs(weights, text), grammars.compile(GrammarSpec("grammar", text)).start()
    every = np.arange(weights.info.n_vocab)
    shown = np.array([is_shown(weights, token) for token in every.tolist()])
    ends = np.array([weights.is_end(token) for token in every.tolist()])
    text_bytes, steps = b"", 0
    while steps < 60:
        allowed = ours.allows(every)
        compared = (
            shown & ~ends if text_bytes.decode(errors="replace").endswith("\ufffd") else shown
        )  # within a character
        assert (allowed & compared == theirs.allows() & compared).all()
        assert not (allowed & ~shown).any()
        choices = [token for token in np.flatnonzero(allowed).tolist() if not weights.is_end(token)]
        choices = [token for token in choices if weights.token_bytes(token)[-1] not in NARROW]
        if not choices:
            break
        longest = max(choices, key=lambda token: len(weights.token_bytes(token)))
        token = longest if random.random() < 0.3 else random.choice(choices)
        theirs.accept(token)
        ours.accept(token)
        text_bytes += weights.token_bytes(token)
        steps += 1
    theirs.close()
    assert steps > 0
