"""Texts that a prepared schema allows, over a vocabulary of single bytes."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import numpy as np

from cellama.engine.grammar.grammars import Compiled, Form, Grammars

END = 256
MAX_BYTES = 200
GRAMMARS = Grammars([*(bytes([byte]) for byte in range(256)), b""], {}, frozenset({END}), list)
ALL = np.arange(END + 1)


def compiled(schema: Any, *, strict: bool = True) -> Compiled:
    return GRAMMARS.compile(Form("json_schema", json.dumps(schema), strict=strict))


def accepts(form: Compiled, text: str) -> bool:
    constraint = form.begin()
    for byte in text.encode():
        if not constraint.allows(np.array([byte]))[0]:
            return False
        constraint.accept(byte)
    return bool(constraint.allows(np.array([END]))[0])


def sample(form: Compiled, random: Random) -> str | None:
    """A text at random, None if it got too long."""
    constraint, text = form.begin(), bytearray()
    while len(text) < 2 * MAX_BYTES:
        allowed = np.flatnonzero(constraint.allows(ALL)).tolist()
        assert allowed, f"no way to go on from {bytes(text)!r}"
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
    """Assert that texts at random conform to the schema; returns how many there were."""
    form = compiled(schema, strict=strict)
    assert form.warnings == ()
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    texts = [text for seed in range(count) if (text := sample(form, Random(seed))) is not None]
    for text in texts:
        value = json.loads(text)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # no half of a surrogate pair, no infinity
        validator.validate(value)
    return len(texts)
