"""Requests: a prompt with sampling parameters and limits.

Requests are validated on creation and can't be changed afterwards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal

from cellama.config import limits
from cellama.engine.text.reply_reader import ReplyFormat

from .errors import InvalidRequest, check, check_int, check_length, check_number, is_real, nearest, utf8


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probabilities of a token and of the most likely tokens at its position.

    The values are natural logarithms, computed before penalties, temperature and filters are applied.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens with their log-probabilities, best first
    text: str = ""  # text of the token (`text_of_bytes`); empty for control tokens
    top_texts: tuple[str, ...] = ()


def text_of_bytes(data: bytes) -> str:
    """Return a token's bytes as text.

    Bytes that are not valid UTF-8, such as part of a character, are written in OpenAI's format: `bytes:\\xe2\\x82`.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def with_texts(entry: TokenLogprob, token_bytes: Callable[[int], bytes]) -> TokenLogprob:
    """Return a copy of the entry that also contains the text of each token."""
    tops = tuple(text_of_bytes(token_bytes(token)) for token, _ in entry.top)
    return replace(entry, text=text_of_bytes(token_bytes(entry.token)), top_texts=tops)


CONSTRAINTS = ("json_schema", "regex", "lark", "grammar")  # parameters that constrain the text; at most one is allowed


def _real(default: float, low: float, high: float) -> Any:
    """Return a field for a number in the range from `low` to `high`."""

    def check_range(name: str, value: object) -> None:
        check(is_real(value) and low <= value <= high, name, value, f"from {low:g} to {high:g}")

    return field(default=default, metadata={"check": check_range})


def _above_zero(default: float, high: float) -> Any:
    """Return a field for a number that is greater than 0 and not greater than `high`."""

    def check_range(name: str, value: object) -> None:
        check(is_real(value) and 0 < value <= high, name, value, f"above 0 and at most {high:g}")

    return field(default=default, metadata={"check": check_range})


def _whole(default: int, low: int, high: int) -> Any:
    """Return a field for a whole number in the range from `low` to `high`."""
    return field(default=default, metadata={"check": partial(check_int, low=low, high=high)})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters that determine how the next token is chosen. Raises InvalidRequest if a value is out of range.

    `temperature=0` selects greedy sampling. `seed=None` selects a random seed.
    """

    temperature: float = _real(0.8, 0.0, limits.MAX_TEMPERATURE)
    top_k: int = _whole(40, 0, limits.MAX_COUNT)  # 0 = all tokens
    top_p: float = _real(0.95, 0.0, 1.0)  # 0 keeps the likeliest token
    min_p: float = _real(0.05, 0.0, 1.0)
    top_n_sigma: float = _real(
        0.0, -1.0, limits.MAX_SIGMA
    )  # standard deviations below the highest logit; ≤ 0 = disabled
    typical_p: float = _above_zero(1.0, 1.0)  # 1 = disabled
    dynatemp_range: float = _real(
        0.0, 0.0, limits.MAX_TEMPERATURE
    )  # temperature ± this range, by entropy; 0 = disabled
    dynatemp_exponent: float = _real(1.0, 0.0, limits.MAX_DYNATEMP_EXPONENT)
    seed: int | None = None
    min_tokens: int = _whole(0, 0, limits.MAX_COUNT)  # tokens of the output before which nothing may end it
    stop_token_ids: tuple[int, ...] = ()  # tokens that end the output, like the model's own end tokens
    repeat_penalty: float = _real(1.0, limits.MIN_REPEAT_PENALTY, limits.MAX_REPEAT_PENALTY)  # 1 = disabled
    frequency_penalty: float = _real(0.0, -limits.MAX_PENALTY, limits.MAX_PENALTY)
    presence_penalty: float = _real(0.0, -limits.MAX_PENALTY, limits.MAX_PENALTY)
    repeat_last_n: int = _whole(64, 0, limits.MAX_LOOK_BACK)  # range of the penalties in tokens, including the prompt
    logit_bias: tuple[tuple[int, float], ...] = ()  # tokens, and the numbers to add to their logits; -inf forbids one
    dry_multiplier: float = _real(0.0, 0.0, limits.MAX_PENALTY)  # 0 = disabled
    dry_base: float = _above_zero(1.75, limits.MAX_DRY_BASE)
    dry_allowed_length: int = _whole(2, 0, limits.MAX_COUNT)  # tokens that may repeat without a penalty
    dry_penalty_last_n: int = _whole(-1, -1, limits.MAX_LOOK_BACK)  # range of DRY in tokens; -1 = all
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = _real(0.0, 0.0, 1.0)  # 0 = disabled
    xtc_threshold: float = _real(0.1, 0.0, 1.0)  # values above 0.5 disable it
    mirostat: int = _whole(0, 0, 2)  # 1 and 2 replace top_k, top_p, min_p, typical_p and XTC
    mirostat_tau: float = _above_zero(5.0, limits.MAX_MIROSTAT_TAU)  # target surprise in bits
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
        self._check_constraints()
        self._check_lists()

    def _check_constraints(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(f"{' and '.join(given)} can't be combined; choose one of them")
        check_length("json_schema", self.json_schema or "", limits.MAX_SCHEMA_CHARS)
        check_length("regex", self.regex or "", limits.MAX_REGEX_CHARS)
        check_length("lark", self.lark or "", limits.MAX_LARK_CHARS)
        check_length("grammar", self.grammar or "", limits.MAX_GRAMMAR_CHARS)
        check_length("grammar_root", self.grammar_root, limits.MAX_NAME_CHARS)

    def _check_lists(self) -> None:
        check_number("stop_token_ids", len(self.stop_token_ids), limits.MAX_STOP_TOKENS, "tokens")
        for token in self.stop_token_ids:
            check_int("a token of stop_token_ids", token, 0, limits.MAX_COUNT)
        check_number("logit_bias", len(self.logit_bias), limits.MAX_BIASES, "tokens")
        for token, bias in self.logit_bias:
            check_int("a token of logit_bias", token, 0, limits.MAX_COUNT)
            ok = bias == -math.inf or (is_real(bias) and abs(bias) <= limits.MAX_BIAS)
            condition = f"a number from {-limits.MAX_BIAS:g} to {limits.MAX_BIAS:g}, or -inf"
            check(ok, f"logit_bias of {token}", bias, condition)
        check_number("dry_sequence_breakers", len(self.dry_sequence_breakers), limits.MAX_DRY_BREAKERS, "texts")
        for text in self.dry_sequence_breakers:
            ok = isinstance(text, str) and 0 < len(utf8(text)) <= limits.MAX_DRY_BREAKER_BYTES
            check(
                ok, "one of dry_sequence_breakers", text, f"text of 1 to {limits.MAX_DRY_BREAKER_BYTES} bytes of UTF-8"
            )

    @property
    def has_penalties(self) -> bool:
        """Whether repetition, frequency or presence penalties change logits (llama.h: llama_sampler_init_penalties)."""
        neutral = self.repeat_penalty == 1 and self.frequency_penalty == 0 and self.presence_penalty == 0
        return not neutral and self.repeat_last_n > 0

    @property
    def has_dry(self) -> bool:
        """Whether the DRY penalty changes logits (llama.h: llama_sampler_init_dry)."""
        return self.dry_multiplier > 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen, regardless of the seed."""
        if self.mirostat:
            return self.temperature == 0
        return (self.temperature == 0 and self.dynatemp_range == 0) or self.top_k == 1

    @property
    def keeps_by_min_p_alone(self) -> bool:
        """Whether min_p is the only filter, in which case the tokens don't need to be sorted."""
        return self.top_k == 0 and self.top_p == 1 and self.typical_p == 1 and self.xtc_probability == 0

    @property
    def draws_from_top_k(self) -> bool:
        """Whether only `top_k`, `top_p`, `min_p` and the temperature decide which tokens can be drawn."""
        has_others = self.typical_p < 1 or self.xtc_probability > 0 or self.top_n_sigma > 0 or self.dynatemp_range > 0
        is_random = not self.is_greedy and not self.mirostat
        return is_random and self.top_k > 0 and not has_others and self.logprobs is None

    @property
    def is_constrained(self) -> bool:
        """Whether a schema, a regular expression or a grammar constrains the text."""
        return any(getattr(self, name) is not None for name in CONSTRAINTS)

    @property
    def is_plainly_greedy(self) -> bool:
        """Whether sampling is greedy and no other feature reads or changes the logits."""
        changed = self.has_penalties or self.logit_bias or self.has_dry or self.min_tokens or self.logprobs is not None
        return self.is_greedy and not changed and not self.is_constrained


_CHECKS = {each.name: each.metadata["check"] for each in fields(SamplingParams) if each.metadata}
_NO_DEFAULTS = frozenset({"logprobs"})  # only a caller that reads the report can request it


def defaults_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's sampling defaults as JSON data, keyed by SamplingParams field. Raises InvalidRequest."""
    known = SamplingParams.__dataclass_fields__.keys() - _NO_DEFAULTS
    for name in given.keys() - known:
        raise InvalidRequest(f"sampling: {name!r} can't have a default; {nearest(name, known)}")
    try:
        defaults = {name: _plain(name, value) for name, value in given.items()}
        sampling_of({}, defaults)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"sampling: a value in {dict(given)!r} has the wrong type: {error}") from None
    return defaults


def _plain(name: str, value: Any) -> Any:
    if name == "json_schema" and isinstance(value, Mapping | bool):
        return json.dumps(value)
    if name == "logit_bias":  # JSON has no -inf
        pairs = value.items() if isinstance(value, Mapping) else value
        return [[int(token), bias if math.isfinite(float(bias)) else str(bias)] for token, bias in pairs]
    return list(value) if isinstance(value, tuple) else value


def sampling_of(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters with the given values, and the model's defaults for all other parameters.

    The defaults must come from `defaults_of`. If a schema, a regular expression or a grammar is given, it replaces the
    model's default constraint. Raises InvalidRequest.
    """
    if any(given.get(name) is not None for name in CONSTRAINTS):
        replaced = {*CONSTRAINTS, "strict_schema", *(["grammar_root"] if "grammar" in defaults else [])}
        defaults = {name: value for name, value in defaults.items() if name not in replaced}
    remaining = {name: _from_json(name, value) for name, value in defaults.items() if name not in given}
    return SamplingParams(**remaining, **given)


def _from_json(name: str, value: Any) -> Any:
    if name == "logit_bias":
        return tuple((token, float(bias)) for token, bias in value)
    return tuple(value) if isinstance(value, list) else value


DEFAULT_PRIORITY = 3
PROTECTED_PRIORITY = 2  # the least urgent priority of protected requests, whose gaps between tokens stay short
INTERACTIVE_PRIORITY = 5  # the least urgent priority of interactive requests; higher numbers are bulk work

Mode = Literal["generate", "stream"]  # whether a caller gets the text at the end or in chunks


@dataclass(frozen=True, slots=True)
class Resumed:
    """The earlier output of an interrupted request.

    The request continues after these tokens as if it had never been interrupted.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    mirostat_mu: float | None = None  # state of mirostat after these tokens; None = initial state


@dataclass(frozen=True, slots=True)
class Share:
    """The fairness key and weights that determine a request's share of the slots. Raises InvalidRequest.

    Waiting requests with the same priority take turns by key, so that each key's computed tokens are proportional to
    its weight. Slashes separate the levels of a key.
    """

    key: str = ""
    weights: tuple[float, ...] = ()  # of the levels of the key; 1 for levels without a weight
    prefill_cost: float = 0.1  # cost of a prompt token relative to a generated token

    def __post_init__(self) -> None:
        check(isinstance(self.key, str), "share.key", self.key, "text")
        check(all(is_real(w) and w > 0 for w in self.weights), "share.weights", self.weights, "numbers above 0")
        check(len(self.weights) <= self.key.count("/") + 2, "share.weights", self.weights, "one number for each level")


@dataclass(frozen=True, slots=True)
class Request:
    """A request to generate text: a prompt as token ids, and parameters for continuing it. Raises InvalidRequest."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    max_tokens: int = 256  # 0: prefill the prompt for later requests, and sample nothing
    n: int = 1  # number of completions of the prompt, with ascending seeds
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False  # whether the text includes the stop string or token that ends it
    ignore_eos: bool = False
    timeout_s: float | None = None  # seconds from submission
    priority: int = DEFAULT_PRIORITY  # 0 is the most urgent, 9 the least
    share: Share = Share()  # requests with the same priority share the slots by its key
    stream: bool = True  # False: no Text events, only Started and Finished
    mode: Mode | None = None  # how the caller gets the text, for telemetry; None = according to `stream`
    return_tokens: bool = False  # add `context_tokens` to the completion
    cache_prompt: bool = True  # reuse cached prefixes, and leave computed cells to later requests
    cache_scope: str = ""  # only requests with the same scope share prefixes
    adapters: tuple[tuple[str, float], ...] | None = None  # LoRA (name, scale); None = defaults, () = none
    submitted_at: float | None = None  # time.monotonic(); None = when the engine receives it
    reply: ReplyFormat | None = None  # format of a chat reply, to separate reasoning and tool calls from the text
    prediction: tuple[int, ...] = ()  # the probable output; matching tokens are accepted several at a time
    only_checks: bool = False  # end with the first token that differs from `prediction`
    resume: tuple[Resumed, ...] = ()  # earlier output of the first completions; the seed must not change
    warnings: tuple[str, ...] = ()  # requested features that are not enforced

    def __post_init__(self) -> None:
        check(len(self.prompt) > 0, "prompt", self.prompt, "at least one token; add some text")
        check_number("prompt", len(self.prompt), limits.MAX_PROMPT_TOKENS, "tokens")
        check_int("max_tokens", self.max_tokens, 0, limits.MAX_COUNT)
        check_int("n", self.n, 1, limits.MAX_COMPLETIONS)
        check_int("priority", self.priority, 0, 9)
        if self.sampling.logprobs is not None:
            _check_reported(self.sampling.logprobs, self.n, self.max_tokens)
        check(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "strings that are not empty")
        check_number("stop", len(self.stop), limits.MAX_STOPS, "texts")
        for text in self.stop:
            check_length("a stop text", text, limits.MAX_STOP_CHARS)
        check(isinstance(self.cache_scope, str), "cache_scope", self.cache_scope, "text")
        check_number("prediction", len(self.prediction), limits.MAX_PROMPT_TOKENS, "tokens")
        check_number("resume", len(self.resume), self.n, "outputs")
        self._check_adapters()
        timeout_ok = self.timeout_s is None or (is_real(self.timeout_s) and 0 < self.timeout_s <= limits.MAX_TIMEOUT_S)
        check(timeout_ok, "timeout_s", self.timeout_s, f"seconds above 0 and at most {limits.MAX_TIMEOUT_S}, or None")

    @property
    def called_mode(self) -> Mode:
        """How the caller receives the text: at the end or in chunks. This value is used for telemetry."""
        return self.mode or ("stream" if self.stream else "generate")

    @property
    def prefill_only(self) -> bool:
        """Whether the request finishes as soon as its prompt has been computed."""
        return self.max_tokens == 0

    @property
    def is_interactive(self) -> bool:
        """Whether a reader is waiting for each token. A request that is not interactive is bulk work."""
        return self.priority <= INTERACTIVE_PRIORITY

    @property
    def is_protected(self) -> bool:
        """Whether other requests may delay this interactive request only slightly (docs/adr/032-overload.md)."""
        return self.priority <= PROTECTED_PRIORITY

    def _check_adapters(self) -> None:
        adapters, max_scale = self.adapters or (), limits.MAX_ADAPTER_SCALE
        check_number("adapters", len(adapters), limits.MAX_ADAPTERS, "names")
        for name, scale in adapters:
            check(isinstance(name, str) and bool(name), "an adapter's name", name, "text that is not empty")
            ok = is_real(scale) and abs(scale) <= max_scale
            condition = f"a number from {-max_scale:g} to {max_scale:g}, for example 1"
            check(ok, f"the scale of adapter {name!r}", scale, condition)
        names = [name for name, _ in adapters]
        check(len(set(names)) == len(names), "adapters", self.adapters, "one scale for each name")


def _check_reported(logprobs: int, n: int, max_tokens: int) -> None:
    count = n * max_tokens * (logprobs + 1)
    if count > limits.MAX_REPORTED:
        raise InvalidRequest(
            f"logprobs {logprobs} for n {n} and max_tokens {max_tokens} can produce {count} entries, but the limit is "
            f"{limits.MAX_REPORTED}; lower one of them"
        )
