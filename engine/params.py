"""What the engine is asked, and how it is set up: frozen, and valid once they exist."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from .errors import InvalidRequest, nearest
from .logprobs import TokenLogprob
from .reply import ReplyFormat

MAX_SEED = 2**32 - 2  # llama.h: 0xFFFFFFFF means "random"
DEFAULT_PRIORITY = 3
MAX_COMPLETIONS = 128
MAX_LOGPROBS = 100
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


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    _check(
        ok, name, value, f"a whole number, {low} or more" if high is None else f"a whole number from {low} to {high}"
    )


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
        _check(_is_real(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "0 or more")
        for name in ("top_p", "typical_p"):
            value = getattr(self, name)
            _check(_is_real(value) and 0 < value <= 1, name, value, "above 0 and at most 1")
        for name in ("min_p", "xtc_probability", "xtc_threshold"):
            value = getattr(self, name)
            _check(_is_real(value) and 0 <= value <= 1, name, value, "from 0 to 1")
        for name in ("repeat_penalty", "dry_base", "mirostat_tau", "mirostat_eta"):
            value = getattr(self, name)
            _check(_is_real(value) and value > 0, name, value, "above 0")
        for name in ("frequency_penalty", "presence_penalty", "dry_multiplier"):
            _check(_is_real(getattr(self, name)), name, getattr(self, name), "a finite number")
        for name in ("top_k", "repeat_last_n", "dry_allowed_length"):
            _check_int(name, getattr(self, name), 0)
        _check_int("dry_penalty_last_n", self.dry_penalty_last_n, -1)
        _check_int("mirostat", self.mirostat, 0, 2)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.grammar is not None and self.json_schema is not None:
            raise InvalidRequest("grammar and json_schema are both given; choose one")
        for token, bias in self.logit_bias:
            _check_int("a token of logit_bias", token, 0)
            _check(not math.isnan(bias) and bias != math.inf, f"logit_bias of {token}", bias, "a number, or -inf")

    @property
    def has_penalties(self) -> bool:
        neutral = self.repeat_penalty == 1 and self.frequency_penalty == 0 and self.presence_penalty == 0
        return not neutral and self.repeat_last_n > 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def keeps_by_min_p_alone(self) -> bool:
        """No filter needs the tokens in order."""
        return self.top_k == 0 and self.top_p == 1 and self.typical_p == 1 and self.xtc_probability == 0

    @property
    def is_plainly_greedy(self) -> bool:
        """Greedy, and nothing changes or watches the logits."""
        changed = self.has_penalties or self.logit_bias or self.dry_multiplier or self.logprobs is not None
        return self.is_greedy and not changed and self.grammar is None and self.json_schema is None


@dataclass(frozen=True, slots=True)
class Resumed:
    """Output that a request has already: it goes on after that, as if nothing had happened between."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


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
        _check_int("max_tokens", self.max_tokens, 1)
        _check_int("n", self.n, 1, MAX_COMPLETIONS)
        _check_int("priority", self.priority, 0, 9)
        _check(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "strings that are not empty")
        for name, scale in self.adapters or ():
            _check(isinstance(name, str) and bool(name), "an adapter's name", name, "text that is not empty")
            _check(_is_real(scale), f"the scale of adapter {name!r}", scale, "a finite number, for instance 1")
        names = [name for name, _ in self.adapters or ()]
        _check(len(set(names)) == len(names), "adapters", self.adapters, "one scale for each name")
        timeout_ok = self.timeout_s is None or (_is_real(self.timeout_s) and self.timeout_s > 0)
        _check(timeout_ok, "timeout_s", self.timeout_s, "seconds above 0, or None")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a model is loaded and batched. None stands for "choose for me". Raises InvalidRequest.

    What a load finds left open of n_parallel, n_ubatch, threads and kv_layout is as `cellama tune` found it best, if
    it did for this model on this machine (tuned.py).
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
    max_queue: int = 0  # waiting requests; 0 = unlimited
    threads: int | None = None  # None = the cores this process may use
    n_gpu_layers: int = -1  # -1 = all; without a GPU build it means nothing
    flash_attention: FlashAttention = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    batch_strategy: str = "adaptive"  # see strategies.py; or the import path of your own, package.module:Class
    # Of embeddings; auto = as the model says, by the mean if it says nothing; none = a vector per token; rank = scores
    # of its classification head, for a model that is loaded to rerank.
    pooling: Pooling = "auto"

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
        _check(self.n_batch >= self.num_slots, "n_batch", self.n_batch, f"at least n_parallel ({self.num_slots})")
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
