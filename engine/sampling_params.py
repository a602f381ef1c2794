"""How the next token is chosen: frozen, and valid once it exists."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from cellama.config import limits

from .checks import check, check_int, check_length, check_number, is_real, utf8
from .errors import InvalidRequest, nearest

CONSTRAINTS = ("json_schema", "regex", "lark", "grammar")  # at most one of these says what the text may be


def _real(default: float, low: float, high: float) -> Any:
    """A field with a number from `low` to `high`."""

    def check_range(name: str, value: object) -> None:
        check(is_real(value) and low <= value <= high, name, value, f"from {low:g} to {high:g}")

    return field(default=default, metadata={"check": check_range})


def _above_zero(default: float, high: float) -> Any:
    """A field with a number above 0 and at most `high`."""

    def check_range(name: str, value: object) -> None:
        check(is_real(value) and 0 < value <= high, name, value, f"above 0 and at most {high:g}")

    return field(default=default, metadata={"check": check_range})


def _whole(default: int, low: int, high: int) -> Any:
    """A field with a whole number from `low` to `high`."""
    return field(default=default, metadata={"check": partial(check_int, low=low, high=high)})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. `temperature=0` is greedy; `seed=None` lets the engine draw one.

    Raises InvalidRequest for a value out of range.
    """

    temperature: float = _real(0.8, 0.0, limits.MAX_TEMPERATURE)
    top_k: int = _whole(40, 0, limits.MAX_COUNT)  # 0 = all tokens
    top_p: float = _above_zero(0.95, 1.0)
    min_p: float = _real(0.05, 0.0, 1.0)
    typical_p: float = _above_zero(1.0, 1.0)  # 1 = off
    seed: int | None = None
    repeat_penalty: float = _real(1.0, limits.MIN_REPEAT_PENALTY, limits.MAX_REPEAT_PENALTY)  # 1 = off
    frequency_penalty: float = _real(0.0, -limits.MAX_PENALTY, limits.MAX_PENALTY)
    presence_penalty: float = _real(0.0, -limits.MAX_PENALTY, limits.MAX_PENALTY)
    repeat_last_n: int = _whole(64, 0, limits.MAX_LOOK_BACK)  # tokens that the penalties look back on, prompt included
    logit_bias: tuple[tuple[int, float], ...] = ()  # token, what is added to its logit; -inf forbids it
    dry_multiplier: float = _real(0.0, 0.0, limits.MAX_PENALTY)  # 0 = off
    dry_base: float = _above_zero(1.75, limits.MAX_DRY_BASE)
    dry_allowed_length: int = _whole(2, 0, limits.MAX_COUNT)  # tokens that may repeat without a penalty
    dry_penalty_last_n: int = _whole(-1, -1, limits.MAX_LOOK_BACK)  # tokens that DRY looks back on; -1 = all
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = _real(0.0, 0.0, 1.0)  # 0 = off
    xtc_threshold: float = _real(0.1, 0.0, 1.0)  # above 0.5 it never applies
    mirostat: int = _whole(0, 0, 2)  # 1 and 2 replace top_k, top_p, min_p, typical_p and XTC
    mirostat_tau: float = _above_zero(5.0, limits.MAX_MIROSTAT_TAU)  # target surprise, bits
    mirostat_eta: float = _above_zero(0.1, limits.MAX_MIROSTAT_ETA)
    json_schema: str | None = None  # JSON Schema as JSON text. At most one of json_schema, regex, lark and grammar
    strict_schema: bool = True  # False: keywords of json_schema that can't be enforced are ignored, with a warning
    regex: str | None = None  # a regular expression of the whole text, in the syntax of Rust's regex crate
    lark: str | None = None  # a grammar in llguidance's variant of Lark
    grammar: str | None = None  # GBNF, see llama.cpp's grammars/README.md
    grammar_root: str = "root"
    logprobs: int | None = None  # top alternatives to report with each token's log-probability; None = no report

    def __post_init__(self) -> None:
        for name, check_range in _CHECKS.items():
            check_range(name, getattr(self, name))
        if self.seed is not None:
            check_int("seed", self.seed, 0, limits.MAX_SEED)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, limits.MAX_LOGPROBS)
        self._check_forms()
        self._check_lists()

    def _check_forms(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(f"{' and '.join(given)} are given together; choose one")
        check_length("json_schema", self.json_schema or "", limits.MAX_SCHEMA_CHARS)
        check_length("regex", self.regex or "", limits.MAX_REGEX_CHARS)
        check_length("lark", self.lark or "", limits.MAX_LARK_CHARS)
        check_length("grammar", self.grammar or "", limits.MAX_GRAMMAR_CHARS)
        check_length("grammar_root", self.grammar_root, limits.MAX_NAME_CHARS)

    def _check_lists(self) -> None:
        check_number("logit_bias", len(self.logit_bias), limits.MAX_BIASES, "tokens")
        for token, bias in self.logit_bias:
            check_int("a token of logit_bias", token, 0, limits.MAX_COUNT)
            ok = bias == -math.inf or (is_real(bias) and abs(bias) <= limits.MAX_BIAS)
            check(ok, f"logit_bias of {token}", bias, f"a number up to {limits.MAX_BIAS:g} either way, or -inf")
        check_number("dry_sequence_breakers", len(self.dry_sequence_breakers), limits.MAX_DRY_BREAKERS, "texts")
        for text in self.dry_sequence_breakers:
            ok = isinstance(text, str) and 0 < len(utf8(text)) <= limits.MAX_DRY_BREAKER_BYTES
            check(
                ok, "one of dry_sequence_breakers", text, f"text of 1 to {limits.MAX_DRY_BREAKER_BYTES} bytes of UTF-8"
            )

    @property
    def has_penalties(self) -> bool:
        """Whether repetition, frequency or presence change logits (llama.h: llama_sampler_init_penalties)."""
        neutral = self.repeat_penalty == 1 and self.frequency_penalty == 0 and self.presence_penalty == 0
        return not neutral and self.repeat_last_n > 0

    @property
    def has_dry(self) -> bool:
        """Whether DRY changes logits (llama.h: llama_sampler_init_dry)."""
        return self.dry_multiplier > 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, whatever the seed."""
        return self.temperature == 0 or (self.top_k == 1 and not self.mirostat)

    @property
    def keeps_by_min_p_alone(self) -> bool:
        """No filter needs the tokens in order."""
        return self.top_k == 0 and self.top_p == 1 and self.typical_p == 1 and self.xtc_probability == 0

    @property
    def is_constrained(self) -> bool:
        """A schema, a regular expression or a grammar says what may come."""
        return any(getattr(self, name) is not None for name in CONSTRAINTS)

    @property
    def is_plainly_greedy(self) -> bool:
        """Greedy, and nothing changes or watches the logits."""
        changed = self.has_penalties or self.logit_bias or self.has_dry or self.logprobs is not None
        return self.is_greedy and not changed and not self.is_constrained


_CHECKS = {each.name: each.metadata["check"] for each in fields(SamplingParams) if each.metadata}
_NO_DEFAULTS = frozenset({"logprobs"})  # what a caller reads, and so asks for


def defaults_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of a model, by the names of SamplingParams, as plain JSON. Raises InvalidRequest."""
    known = SamplingParams.__dataclass_fields__.keys() - _NO_DEFAULTS
    for name in given.keys() - known:
        raise InvalidRequest(f"sampling has {name!r}, for which there is no default; {nearest(name, known)}")
    try:
        defaults = {name: _plain(name, value) for name, value in given.items()}
        sampling_of({}, defaults)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"sampling is {dict(given)!r}, and a value has the wrong type: {error}") from None
    return defaults


def _plain(name: str, value: Any) -> Any:
    if name == "json_schema" and isinstance(value, Mapping | bool):
        return json.dumps(value)
    if name == "logit_bias":  # -inf is no JSON
        pairs = value.items() if isinstance(value, Mapping) else value
        return [[int(token), bias if math.isfinite(float(bias)) else str(bias)] for token, bias in pairs]
    return list(value) if isinstance(value, tuple) else value


def sampling_of(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """What a caller gave, and for the rest a model's defaults (`defaults_of`). Raises InvalidRequest.

    A schema, regular expression or grammar that is given takes the place of the one in the defaults.
    """
    if any(given.get(name) is not None for name in CONSTRAINTS):
        replaced = {*CONSTRAINTS, "strict_schema", *(["grammar_root"] if "grammar" in defaults else [])}
        defaults = {name: value for name, value in defaults.items() if name not in replaced}
    left = {name: _in_form(name, value) for name, value in defaults.items() if name not in given}
    return SamplingParams(**left, **given)


def _in_form(name: str, value: Any) -> Any:
    if name == "logit_bias":
        return tuple((token, float(bias)) for token, bias in value)
    return tuple(value) if isinstance(value, list) else value
