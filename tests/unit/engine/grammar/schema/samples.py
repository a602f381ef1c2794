"""Random texts that a prepared schema allows, over a vocabulary of single bytes."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import numpy as np

from cellama.engine.grammar.grammars import CompiledGrammar, Grammars, GrammarSpec

END = 256
MAX_BYTES = 200
GRAMMARS = Grammars([*(bytes([byte]) for byte in range(256)), b""], {}, frozenset({END}), list)
ALL = np.arange(END + 1)


def compiled(schema: Any, *, strict: bool = True) -> CompiledGrammar:
    return GRAMMARS.compile(GrammarSpec("json_schema", json.dumps(schema), strict=strict))


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    constraint = grammar.start()
    for byte in text.encode():
        if not constraint.allows(np.array([byte]))[0]:
            return False
        constraint.accept(byte)
    return bool(constraint.allows(np.array([END]))[0])


def sample(grammar: CompiledGrammar, random: Random) -> str | None:
    """Return a random text, or None if it gets too long."""
    constraint, text = grammar.start(), bytearray()
    while len(text) < 2 * MAX_BYTES:
        allowed = np.flatnonzero(constraint.allows(ALL)).tolist()
        assert allowed, f"no byte can follow {bytes(text)!r}"
        if END in allowed and (len(allowed) == 1 or random.random() < 0.4):
            return text.decode()
        following = [byte for byte in allowed if byte != END]
        closing = [byte for byte in following if byte in b'"]},']
        readable = [byte for byte in following if 0x20 <= byte < 0x7F] if random.random() < 0.95 else following
        hurry = len(text) > MAX_BYTES / 2 or random.random() < 0.3
        text.append(random.choice(closing if closing and hurry else readable or following))
        constraint.accept(text[-1])
    return None


def check_samples(schema: Any, count: int = 10, *, strict: bool = True) -> int:
    """Assert that random texts conform to the schema, and return their number."""
    grammar = compiled(schema, strict=strict)
    assert grammar.warnings == ()
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    texts = [text for seed in range(count) if (text := sample(grammar, Random(seed))) is not None]
    for text in texts:
        value = json.loads(text)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # fails on unpaired surrogates and infinity
        validator.validate(value)
    return len(texts)
