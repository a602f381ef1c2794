"""Grammars on llama.cpp's grammar engine."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidRequest
from ..params import SamplingParams
from . import log as llama_log
from .json_schema import schema_to_gbnf

if TYPE_CHECKING:
    from .model import LlamaModel

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama.h: llama_token_data


class Grammar:
    """What may come next by a GBNF grammar. The Constraint of `sampling.py`. Engine thread only."""

    def __init__(self, model: LlamaModel, text: str, root: str) -> None:
        """Raises InvalidRequest when llama.cpp can't take the grammar."""
        llama_log.take_errors()
        self._sampler = lib.llama_sampler_init_grammar(model.vocab, text.encode(), root.encode())
        if not self._sampler:
            reason = llama_log.take_errors() or f"it is no valid GBNF with a rule {root!r}"
            raise InvalidRequest(f"the grammar can't be used: {reason}; see llama.cpp's grammars/README.md")

    def allows(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        candidates = np.zeros(len(tokens), CANDIDATE)
        candidates["id"] = tokens
        apply(self._sampler, candidates)
        allowed: NDArray[np.bool_] = candidates["logit"] > -np.inf
        return allowed

    def accept(self, token: int) -> None:
        # llama.cpp would end the process on a token that the grammar rejects: the caller has asked `allows`.
        lib.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        lib.llama_sampler_free(self._sampler)


def apply(sampler: Any, candidates: NDArray[Any]) -> None:
    """Runs a llama.cpp sampler over candidates, in place and in their order."""
    array = lib.llama_token_data_array(
        data=candidates.ctypes.data_as(lib.llama_token_data_p), size=len(candidates), selected=-1, sorted=False
    )
    lib.llama_sampler_apply(sampler, ctypes.byref(array))


def grammar_of(params: SamplingParams) -> tuple[str, str] | None:
    """GBNF and the name of its root rule, None if the request is free. Raises InvalidRequest."""
    if params.json_schema is not None:
        return schema_to_gbnf(params.json_schema), "root"
    return None if params.grammar is None else (params.grammar, params.grammar_root)
