"""What the engine is asked, and how it is set up: frozen, and valid once they exist."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from cellama.config import limits
from cellama.engine.text.reply_parser import ReplyFormat

from .errors import InvalidRequest, nearest
from .logprobs import TokenLogprob

MAX_SEED = limits.MAX_SEED
DEFAULT_PRIORITY = 3
DEFAULT_SLOTS = 8
MAX_SLOTS = 256  # llama.cpp: LLAMA_MAX_SEQ
DEFAULT_UBATCH = 512  # tokens
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")

FlashAttention = Literal["auto", "on", "off"]
Pooling = Literal["auto", "mean", "cls", "last", "none", "rank"]
KvLayout = Literal["auto", "unified", "partitioned"]


def _check(ok: bool, name: str, value: object, wanted: str) -> None:
    if not ok:
        raise InvalidRequest(f"{name} is {value!r}; it must be {wanted}")


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _check_length(name: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise InvalidRequest(f"{name} has {len(text)} characters, and the limit is {limit}; make it shorter")


def _check_number(name: str, count: int, limit: int, what: str) -> None:
    if count > limit:
        raise InvalidRequest(f"{name} has {count} {what}, and the limit is {limit}; leave some out")


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    _check(
        ok, name, value, f"a whole number, {low} or more" if high is None else f"a whole number from {low} to {high}"
    )


_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, limits.MAX_TEMPERATURE),
    "min_p": (0, 1),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "repeat_penalty": (limits.MIN_REPEAT_PENALTY, limits.MAX_REPEAT_PENALTY),
    "frequency_penalty": (-limits.MAX_PENALTY, limits.MAX_PENALTY),
    "presence_penalty": (-limits.MAX_PENALTY, limits.MAX_PENALTY),
    "dry_multiplier": (0, limits.MAX_PENALTY),
}
_ABOVE_ZERO = {
    "top_p": 1.0,
    "typical_p": 1.0,
    "dry_base": limits.MAX_DRY_BASE,
    "mirostat_tau": limits.MAX_MIROSTAT_TAU,
    "mirostat_eta": limits.MAX_MIROSTAT_ETA,
}
_COUNTS = {
    "top_k": (0, limits.MAX_COUNT),
    "repeat_last_n": (0, limits.MAX_LOOK_BACK),
    "dry_allowed_length": (0, limits.MAX_COUNT),
    "dry_penalty_last_n": (-1, limits.MAX_LOOK_BACK),
    "mirostat": (0, 2),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. `temperature=0` is greedy; `seed=None` lets the engine draw one.

    Raises InvalidRequest for a value out of range.
    """

    temperature: float = 0.8
    top_k: int = 40  # 0 = all tokens
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0  # 1 = off
    seed: int | None = None
    repeat_penalty: float = 1.0  # 1 = off
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = 64  # tokens that the penalties look back on, prompt included
    logit_bias: tuple[tuple[int, float], ...] = ()  # token, what is added to its logit; -inf forbids it
    dry_multiplier: float = 0.0  # 0 = off
    dry_base: float = 1.75
    dry_allowed_length: int = 2  # tokens that may repeat without a penalty
    dry_penalty_last_n: int = -1  # tokens that DRY looks back on; -1 = the whole context
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0  # 0 = off
    xtc_threshold: float = 0.1  # above 0.5 it never applies
    mirostat: int = 0  # 1 and 2 replace top_k, top_p, min_p, typical_p and XTC
    mirostat_tau: float = 5.0  # wanted surprise, bits
    mirostat_eta: float = 0.1
    grammar: str | None = None  # GBNF, see llama.cpp's grammars/README.md
    grammar_root: str = "root"
    json_schema: str | None = None  # JSON Schema as JSON text, instead of a grammar
    logprobs: int | None = None  # top alternatives to report with each token's log-probability; None = no report

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            ok = _is_real(value) and low <= value <= high
            _check(ok, name, value, f"from {low:g} to {high:g}")
        for name, high in _ABOVE_ZERO.items():
            value = getattr(self, name)
            _check(_is_real(value) and 0 < value <= high, name, value, f"above 0 and at most {high:g}")
        for name, (low, high) in _COUNTS.items():
            _check_int(name, getattr(self, name), low, high)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, limits.MAX_SEED)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, limits.MAX_LOGPROBS)
        self._check_forms()
        self._check_lists()

    def _check_forms(self) -> None:
        if self.grammar is not None and self.json_schema is not None:
            raise InvalidRequest("grammar and json_schema are both given; choose one")
        _check_length("grammar", self.grammar or "", limits.MAX_GRAMMAR_CHARS)
        _check_length("grammar_root", self.grammar_root, limits.MAX_NAME_CHARS)
        _check_length("json_schema", self.json_schema or "", limits.MAX_SCHEMA_CHARS)

    def _check_lists(self) -> None:
        _check_number("logit_bias", len(self.logit_bias), limits.MAX_BIASES, "tokens")
        for token, bias in self.logit_bias:
            _check_int("a token of logit_bias", token, 0, limits.MAX_COUNT)
            ok = bias == -math.inf or (_is_real(bias) and abs(bias) <= limits.MAX_BIAS)
            _check(ok, f"logit_bias of {token}", bias, f"a number up to {limits.MAX_BIAS:g} either way, or -inf")
        _check_number("dry_sequence_breakers", len(self.dry_sequence_breakers), limits.MAX_DRY_BREAKERS, "texts")
        for text in self.dry_sequence_breakers:
            ok = isinstance(text, str) and 0 < len(_utf8(text)) <= limits.MAX_DRY_BREAKER_BYTES
            _check(
                ok, "one of dry_sequence_breakers", text, f"text of 1 to {limits.MAX_DRY_BREAKER_BYTES} bytes of UTF-8"
            )

    @property
    def has_penalties(self) -> bool:
        neutral = self.repeat_penalty == 1 and self.frequency_penalty == 0 and self.presence_penalty == 0
        return not neutral and self.repeat_last_n > 0

    @property
    def has_dry(self) -> bool:
        return self.dry_multiplier > 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or (self.top_k == 1 and not self.mirostat)

    @property
    def keeps_by_min_p_alone(self) -> bool:
        """No filter needs the tokens in order."""
        return self.top_k == 0 and self.top_p == 1 and self.typical_p == 1 and self.xtc_probability == 0

    @property
    def is_plainly_greedy(self) -> bool:
        """Greedy, and nothing changes or watches the logits."""
        changed = self.has_penalties or self.logit_bias or self.has_dry or self.logprobs is not None
        return self.is_greedy and not changed and self.grammar is None and self.json_schema is None


@dataclass(frozen=True, slots=True)
class Resumed:
    """Output that a request has already: it goes on after that, as if nothing had happened between."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    mirostat_mu: float | None = None  # what mirostat had learned by then; None = nothing


@dataclass(frozen=True, slots=True)
class Request:
    """One generation: a prompt of token ids and how it goes on. Raises InvalidRequest when it can't be meant."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    max_tokens: int = 256
    n: int = 1  # completions of the one prompt, with seeds counting up
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    timeout_s: float | None = None  # from submission
    priority: int = DEFAULT_PRIORITY  # 0 is the most urgent, 9 the least
    stream: bool = True  # False: no Text events, only Started and Finished
    cache_prompt: bool = True  # take over what is in the cache, and leave what was computed to others
    cache_scope: str = ""  # only requests of the same scope share prefixes
    adapters: tuple[tuple[str, float], ...] | None = None  # LoRA, name and scale; None = the model's own, () = none
    submitted_at: float | None = None  # time.monotonic(); None = when the engine gets it
    reply: ReplyFormat | None = None  # of a chat: how thinking and tool calls are told from the text
    resume: tuple[Resumed, ...] = ()  # of the first completions; the seed must be that of the first time

    def __post_init__(self) -> None:
        _check(len(self.prompt) > 0, "prompt", self.prompt, "at least one token; give it some text")
        _check_number("prompt", len(self.prompt), limits.MAX_PROMPT_TOKENS, "tokens")
        _check_int("max_tokens", self.max_tokens, 1, limits.MAX_COUNT)
        _check_int("n", self.n, 1, limits.MAX_COMPLETIONS)
        _check_int("priority", self.priority, 0, 9)
        if self.sampling.logprobs is not None:
            _check_reported(self.sampling.logprobs, self.n, self.max_tokens)
        _check(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "strings that are not empty")
        _check_number("stop", len(self.stop), limits.MAX_STOPS, "texts")
        for text in self.stop:
            _check_length("a text of stop", text, limits.MAX_STOP_CHARS)
        _check_number("resume", len(self.resume), self.n, "outputs")
        self._check_adapters()
        timeout_ok = self.timeout_s is None or (_is_real(self.timeout_s) and 0 < self.timeout_s <= limits.MAX_TIMEOUT_S)
        _check(timeout_ok, "timeout_s", self.timeout_s, f"seconds above 0 and at most {limits.MAX_TIMEOUT_S}, or None")

    def _check_adapters(self) -> None:
        adapters, most = self.adapters or (), limits.MAX_ADAPTER_SCALE
        _check_number("adapters", len(adapters), limits.MAX_ADAPTERS, "names")
        for name, scale in adapters:
            _check(isinstance(name, str) and bool(name), "an adapter's name", name, "text that is not empty")
            ok = _is_real(scale) and abs(scale) <= most
            _check(ok, f"the scale of adapter {name!r}", scale, f"a number up to {most:g} either way, for instance 1")
        names = [name for name, _ in adapters]
        _check(len(set(names)) == len(names), "adapters", self.adapters, "one scale for each name")


def _check_reported(logprobs: int, n: int, max_tokens: int) -> None:
    count = n * max_tokens * (logprobs + 1)
    if count > limits.MAX_REPORTED:
        raise InvalidRequest(
            f"logprobs {logprobs} for n {n} and max_tokens {max_tokens} make up to {count} entries, and the limit is "
            f"{limits.MAX_REPORTED}; lower one of them"
        )


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a model is loaded and batched. None stands for "choose for me". Raises InvalidRequest.

    What a load finds left open of n_parallel, n_ubatch, threads and kv_layout is as `cellama tune` found it best, if
    it did for this model on this machine (tuned_options.py).
    """

    n_parallel: int | None = None  # slots; `num_slots` has the number
    n_ctx: int | None = None  # tokens of the KV cache in all; None = n_parallel × ctx_per_slot
    ctx_per_slot: int | None = None  # tokens; None = from n_ctx, else the training context as far as memory goes
    kv_layout: KvLayout = "auto"  # docs/adr/003-kv-layout.md
    cache_prompt: bool = True  # False: no request shares its prefix
    cache_ram_bytes: int = 1 << 30  # quota of states kept in RAM; 0 = none
    n_batch: int = 2048  # token budget of a step, as far as n_ubatch goes
    n_ubatch: int | None = None  # tokens of one pass inside llama.cpp; a step is one pass; `pass_tokens` has the number
    chunk_size: int = 512  # prompt tokens per slot and step, at most
    max_queue: int = 0  # requests that wait because no slot is free for them; 0 = unlimited
    threads: int | None = None  # None = a share of the cores that this process may use, as core_sharing.py finds it
    n_gpu_layers: int = -1  # -1 = all; without a GPU build it means nothing
    flash_attention: FlashAttention = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    batch_strategy: str = "adaptive"  # see strategies.py; or the import path of your own, package.module:Class
    # Of embeddings; auto = as the model says, by the mean if it says nothing; none = a vector per token; rank = scores
    # of its classification head, for a model that is loaded to rerank.
    pooling: Pooling = "auto"
    control_tokens_in_text: bool = False  # what reads like a control token in messages and rerank's texts becomes one

    def __post_init__(self) -> None:
        for name in ("n_batch", "chunk_size"):
            _check_int(name, getattr(self, name), 1)
        _check_int("n_parallel", self.num_slots, 1, MAX_SLOTS)
        _check_int("n_ubatch", DEFAULT_UBATCH if self.n_ubatch is None else self.n_ubatch, 1)
        _check_int("max_queue", self.max_queue, 0)
        _check_int("cache_ram_bytes", self.cache_ram_bytes, 0)
        _check_int("n_gpu_layers", self.n_gpu_layers, -1)
        for name in ("ctx_per_slot", "n_ctx"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1)
        if self.threads is not None:
            _check_int("threads", self.threads, 1, 512)
        # A step is one pass, and every slot that decodes needs a token of it: those beyond would starve.
        least = f"at least n_parallel ({self.num_slots})"
        _check(self.n_batch >= self.num_slots, "n_batch", self.n_batch, least)
        _check(self.pass_tokens >= self.num_slots, "n_ubatch", self.pass_tokens, f"{least}; raise it, or lower that")
        self._check_one_of("flash_attention", get_args(FlashAttention))
        self._check_one_of("kv_layout", get_args(KvLayout))
        self._check_one_of("pooling", get_args(Pooling))
        self._check_one_of("cache_type_k", CACHE_TYPES)
        self._check_one_of("cache_type_v", CACHE_TYPES)

    @property
    def num_slots(self) -> int:
        """`n_parallel`, or what it is when nobody chose."""
        return DEFAULT_SLOTS if self.n_parallel is None else self.n_parallel

    @property
    def pass_tokens(self) -> int:
        """Tokens of one pass: `n_ubatch`, or what it is when nobody chose, and never more than a step has."""
        return min(DEFAULT_UBATCH if self.n_ubatch is None else self.n_ubatch, self.n_batch)

    def _check_one_of(self, name: str, known: Iterable[str]) -> None:
        value = getattr(self, name)
        if value not in known:
            raise InvalidRequest(f"{name} is {value!r}; {nearest(str(value), known)}")
