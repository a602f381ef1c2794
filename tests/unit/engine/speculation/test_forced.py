"""Text that a schema requires, as drafts."""

from __future__ import annotations

import json

from cellama.engine import Request, SamplingParams
from cellama.engine.grammar.grammars import Grammars, GrammarSpec
from cellama.engine.llama.backend import LlamaSampler
from cellama.engine.scheduling.sequence import Sequence
from cellama.engine.speculation.sources import ForcedText

END = 256
ADDRESS = {
    "type": "object",
    "properties": {"größe": {"enum": ["alpha", "beta"]}},
    "required": ["größe"],
    "additionalProperties": False,
}
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"customer_name": {"type": "string", "maxLength": 20}, "address": ADDRESS},
        "required": ["customer_name", "address"],
        "additionalProperties": False,
    }
)
GRAMMARS = Grammars([bytes([i]) for i in range(256)] + [b""], {END: b"<end>"}, frozenset({END}), list)


class Bound:
    """The part of a sampler that is used here."""

    forced_tokens = LlamaSampler.forced_tokens

    def __init__(self) -> None:
        self._grammar, self._is_bound = GRAMMARS.compile(GrammarSpec("json_schema", SCHEMA)).start(), False

    def bind(self) -> None:
        self._is_bound = True

    def accept(self, text: bytes) -> None:
        for byte in text:
            self._grammar.accept(byte)


def test_forced_text_becomes_a_draft_once_the_schema_applies() -> None:
    sequence = Sequence(Request("it", (1,), SamplingParams(json_schema=SCHEMA, temperature=0)), 1, 0.0, [1])
    source = ForcedText(sequence)
    assert source.draft(40) is None  # it has no sampler yet
    sampler = Bound()
    sequence.sampler = sampler  # type: ignore[assignment]
    assert source.draft(40) is None
    sampler.bind()
    draft = source.draft(40)
    assert draft is not None
    assert bytes(draft.tokens) == b'{"customer_name": "'
    assert len(set(draft.buckets)) == 1
    assert bytes(source.draft(4).tokens) == b'{"cu'  # type: ignore[union-attr]


def test_forced_text_stops_where_the_grammar_allows_a_choice() -> None:
    sampler = Bound()
    sampler.bind()
    sampler.accept(b'{"customer_name": "Mia')
    assert sampler.forced_tokens() == []
    sampler.accept(b'"')
    assert bytes(sampler.forced_tokens()).decode() == ', "address": {"größe": "'
    sampler.accept(', "address": {"größe": "al'.encode())
    assert bytes(sampler.forced_tokens()) == b'pha"}}'
    sampler.accept(b'pha"}}')
    assert sampler.forced_tokens() == []
