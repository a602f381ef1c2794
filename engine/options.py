"""Options and capabilities for loading a model.

All values are validated on creation and can't be changed afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from .errors import InvalidRequest, check, check_int, is_real, nearest
from .request import defaults_of

DEFAULT_SLOTS = 8  # number of slots; more of them increase throughput and memory use (docs/how-to/performance.md)
MAX_SLOTS = 256  # llama.cpp: LLAMA_MAX_SEQ
DEFAULT_UBATCH = 512  # tokens
DEFAULT_CHUNK = 512  # tokens
DRAFT_PASS = 128  # tokens in a pass of a draft model, unless it has more slots
CHECKED_ROWS = 16  # rows of logits that are always available for `Engine.verify`
DEFAULT_SAVED_BYTES = 1 << 30  # bytes of KV states in RAM
DEFAULT_DISK_BYTES = 8 << 30  # bytes of KV states on disk
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")

MAX_OVERRIDE_BYTES = 128  # llama.h: size of a key or a string in llama_model_kv_override, with a final 0
ROPE_OPTIONS = (
    *("rope_scaling", "rope_freq_base", "rope_freq_scale"),
    *("yarn_orig_ctx", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"),
)

FlashAttention = Literal["auto", "on", "off"]
Speculation = Literal["auto", "off"]
Pooling = Literal["auto", "mean", "cls", "last", "none", "rank"]
KvLayout = Literal["auto", "unified", "partitioned"]
SplitMode = Literal["none", "layer", "row", "tensor"]
RopeScaling = Literal["none", "linear", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options for loading a model and batching its requests. Raises InvalidRequest.

    If an option is None, cellama chooses a value. If `cellama tune` was run for this model on this machine, the tuning
    results replace None for n_parallel, n_ubatch and threads, and "auto" for kv_layout (tuned_options.py).
    """

    n_parallel: int | None = None  # number of slots; the property `num_slots` has the number that is used
    n_ctx: int | None = None  # tokens of the whole KV cache; None = n_parallel × ctx_per_slot
    ctx_per_slot: int | None = None  # tokens per slot; None = from n_ctx, or the training context if it fits
    kv_layout: KvLayout = "auto"  # docs/adr/003-kv-layout.md
    cache_prompt: bool = True  # share prefixes between requests
    # Quota of KV states in RAM; 0 = none, None = up to 1 GiB of the available memory. `saved_bytes` has the value.
    cache_ram_bytes: int | None = None
    cache_dir: str | None = None  # directory of KV states, which processes can share; None = no states on disk
    cache_disk_bytes: int = DEFAULT_DISK_BYTES  # quota of cache_dir
    n_batch: int = 2048  # maximum number of tokens per step; n_ubatch also limits it
    n_ubatch: int | None = None  # tokens in one pass inside llama.cpp, which is one step; `pass_tokens` has the value
    # Prompt tokens per slot and step, at most one pass. `chunk_tokens` has the value. If n_ubatch is None, a larger
    # chunk_size increases it.
    chunk_size: int | None = None
    max_queue: int = 0  # maximum number of requests that wait for a slot; 0 = unlimited
    # Share of the slots that bulk requests keep, or get first, while interactive ones wait; see `bulk_slots`.
    bulk_share: float = 0.0
    threads: int | None = None  # number of threads; None = this process's share of the cores (core_sharing.py)
    # Placement on devices (engine/llama/placement.py). Builds without GPU support ignore n_gpu_layers.
    n_gpu_layers: int | None = None  # number of layers on GPUs; -1 = all, None = as many as fit
    devices: tuple[str, ...] | None = None  # names of the GPUs to use, in order; () = none, None = all
    rpc: tuple[str, ...] = ()  # addresses HOST:PORT of llama.cpp RPC servers, whose devices follow the local ones
    rpc_public: bool = False  # allow addresses of RPC servers outside of private networks
    split_mode: SplitMode = "layer"
    tensor_split: tuple[float, ...] | None = None  # share of each device; None = in proportion to free memory
    main_gpu: int = 0  # index in `devices` of the GPU to use with split_mode "none"
    n_cpu_moe: int = 0  # number of layers, from the first, whose experts stay in RAM; -1 = all
    override_tensors: tuple[str, ...] = ()  # REGEX=DEVICE; the first match determines a tensor's device
    kv_offload: bool = True  # KV cells on the devices of their layers, instead of in RAM
    use_mmap: bool = True  # map the file instead of reading it
    use_mlock: bool = False  # keep the weights in RAM
    kv_overrides: Mapping[str, int | float | bool | str] | None = None  # values for keys of the file's metadata
    rope_scaling: RopeScaling | None = None  # None, here and below, uses the value in the file
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None  # 0.5 doubles the context for which positions are scaled
    yarn_orig_ctx: int | None = None  # training context in tokens, before YaRN
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None
    flash_attention: FlashAttention = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    batch_strategy: str = "adaptive"  # name of a strategy, or the import path of your own, package.module:Class
    # Import paths package.module:name of logits processors, in the order in which they apply (sampling/processors.py).
    logits_processors: tuple[str, ...] = ()
    speculation: Speculation = "auto"  # drafts tokens while that is faster (docs/adr/015-speculation.md)
    draft: str | None = None  # source of a small model with the same vocabulary, which also drafts tokens
    # Pooling of embeddings. The value auto means the model's own pooling, or else mean. With none, there is one vector
    # per token, and with rank, there are scores for reranking.
    pooling: Pooling = "auto"
    control_tokens_in_text: bool = False  # parse control tokens in messages and in texts to rank
    # Defaults for SamplingParams by name, except logprobs; see `sampling_defaults`.
    sampling: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_int("n_batch", self.n_batch, 1)
        check_int("n_parallel", self.num_slots, 1, MAX_SLOTS)
        check_int("n_ubatch", DEFAULT_UBATCH if self.n_ubatch is None else self.n_ubatch, 1)
        check_int("max_queue", self.max_queue, 0)
        check(0 <= self.bulk_share < 1, "bulk_share", self.bulk_share, "at least 0 and less than 1")
        check_int("cache_ram_bytes", self.saved_bytes, 0)
        check_int("cache_disk_bytes", self.cache_disk_bytes, 0)
        is_path = self.cache_dir is None or (isinstance(self.cache_dir, str) and "\0" not in self.cache_dir != "")
        check(is_path, "cache_dir", self.cache_dir, "the path of a directory, or None")
        self._check_placement()
        for name in ("ctx_per_slot", "n_ctx", "chunk_size"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        if self.threads is not None:
            check_int("threads", self.threads, 1, 512)
        # A step is one pass, and every decoding slot needs one of its tokens. Slots without a token would starve.
        condition = f"at least n_parallel ({self.num_slots})"
        check(self.n_batch >= self.num_slots, "n_batch", self.n_batch, condition)
        condition += "; raise it or lower n_parallel"
        check(self.pass_tokens >= self.num_slots, "n_ubatch", self.pass_tokens, condition)
        condition = (
            f"at most n_ubatch and n_batch ({self.pass_tokens}), which limit the tokens of a step; "
            "lower it, or raise them"
        )
        check((self.chunk_size or 1) <= self.pass_tokens, "chunk_size", self.chunk_size, condition)
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors))  # a list after JSON
        if self.sampling is not None:
            object.__setattr__(self, "sampling", defaults_of(self.sampling))
        self._check_one_of("flash_attention", get_args(FlashAttention))
        self._check_one_of("kv_layout", get_args(KvLayout))
        self._check_one_of("speculation", get_args(Speculation))
        is_source = self.draft is None or (isinstance(self.draft, str) and self.draft != "")
        check(is_source, "draft", self.draft, "the source of a model, or None")
        is_used = self.draft is None or self.speculation != "off"
        check(is_used, "draft", self.draft, 'None while speculation is "off"; set speculation to "auto"')
        self._check_one_of("pooling", get_args(Pooling))
        self._check_one_of("cache_type_k", CACHE_TYPES)
        self._check_one_of("cache_type_v", CACHE_TYPES)

    def _check_placement(self) -> None:
        if self.n_gpu_layers is not None:
            check_int("n_gpu_layers", self.n_gpu_layers, -1)
        for name in ("devices", "rpc", "tensor_split", "override_tensors"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))  # a list after JSON
        for device in self.devices or ():
            check(isinstance(device, str) and device != "", "devices", device, "the name of a device")
        check(len(set(self.devices or ())) == len(self.devices or ()), "devices", self.devices, "different devices")
        self._check_one_of("split_mode", get_args(SplitMode))
        if self.rope_scaling is not None:
            self._check_one_of("rope_scaling", get_args(RopeScaling))
        shares = self.tensor_split
        is_split = shares is None or (all(is_real(one) and one >= 0 for one in shares) and sum(shares) > 0)
        check(is_split, "tensor_split", shares, "shares of 0 or more, at least one of them above 0")
        if shares is not None and self.devices is not None:
            condition = f"one share for each of the {len(self.devices)} devices"
            check(len(shares) == len(self.devices), "tensor_split", shares, condition)
        check_int("main_gpu", self.main_gpu, 0)
        check_int("n_cpu_moe", self.n_cpu_moe, -1)
        for override in self.override_tensors:
            pattern, _, device = str(override).rpartition("=")
            check(bool(pattern and device), "override_tensors", override, "REGEX=DEVICE, such as ffn_.*_exps=CPU")
            if self.split_mode == "tensor" and device != "CPU":
                raise InvalidRequest(
                    f'override_tensors: {override}: with split_mode "tensor", tensors can only be moved to the CPU; '
                    "use CPU, or another split_mode"
                )
            try:
                re.compile(pattern)
            except re.error as error:
                raise InvalidRequest(f"override_tensors: {pattern!r} is not a regular expression: {error}") from None
        for address in self.rpc:
            host, _, port = str(address).rpartition(":")
            is_address = bool(host) and port.isdigit() and 0 < int(port) < 65536
            check(is_address, "rpc", address, "HOST:PORT of a llama.cpp RPC server")
        for key, value in (self.kv_overrides or {}).items():
            fits = len(str(key).encode()) < MAX_OVERRIDE_BYTES and len(str(value).encode()) < MAX_OVERRIDE_BYTES
            is_value = isinstance(value, bool | int | str) or is_real(value)
            condition = f"a bool, a number or a string, and key and value at most {MAX_OVERRIDE_BYTES - 1} bytes"
            check(fits and is_value, f"kv_overrides.{key}", value, condition)
        if self.yarn_orig_ctx is not None:
            check_int("yarn_orig_ctx", self.yarn_orig_ctx, 1)
        for name in ("rope_freq_base", "rope_freq_scale"):
            value = getattr(self, name)
            check(value is None or (is_real(value) and value > 0), name, value, "a number above 0")
        for name in ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"):
            value = getattr(self, name)
            check(value is None or (is_real(value) and value >= 0), name, value, "a number, 0 or more")

    @property
    def num_slots(self) -> int:
        """The number of slots: `n_parallel` or its default."""
        return DEFAULT_SLOTS if self.n_parallel is None else self.n_parallel

    @property
    def bulk_slots(self) -> int:
        """The number of slots that `bulk_share` guarantees to bulk requests.

        A share above 0 guarantees at least one slot, but never all slots.
        """
        slots = round(self.bulk_share * self.num_slots)
        return min(max(slots, 1), self.num_slots - 1) if self.bulk_share else 0

    @property
    def pass_tokens(self) -> int:
        """The maximum number of tokens in one pass: `n_ubatch` or its default, limited to `n_batch`."""
        widest = max(DEFAULT_UBATCH, self.chunk_size or 0) if self.n_ubatch is None else self.n_ubatch
        return min(widest, self.n_batch)

    @property
    def logit_rows(self) -> int:
        """The maximum number of tokens with logits in a decode call: one token per slot, plus draft tokens."""
        slots = self.num_slots
        rows = max(slots, CHECKED_ROWS) if self.speculation == "off" else max(slots + CHECKED_ROWS, 3 * slots)
        return min(self.pass_tokens, rows)

    @property
    def of_draft(self) -> EngineOptions:
        """Options for the draft model.

        The draft model has the same number and size of slots, a single pool of cells, and no saved states.
        """
        pass_tokens = max(DRAFT_PASS, self.num_slots)
        return replace(
            self,
            draft=None,
            speculation="off",
            kv_layout="unified",
            n_batch=pass_tokens,
            n_ubatch=pass_tokens,
            chunk_size=None,
            cache_prompt=False,
            cache_ram_bytes=0,
            cache_dir=None,
            sampling=None,
            logits_processors=(),
            n_cpu_moe=0,
            override_tensors=(),
            kv_overrides=None,
            rope_scaling=None,
            rope_freq_base=None,
            rope_freq_scale=None,
            yarn_orig_ctx=None,
            yarn_ext_factor=None,
            yarn_attn_factor=None,
            yarn_beta_fast=None,
            yarn_beta_slow=None,
        )

    @property
    def chunk_tokens(self) -> int:
        """The maximum number of prompt tokens per slot and step: `chunk_size` or its default."""
        return min(DEFAULT_CHUNK, self.pass_tokens) if self.chunk_size is None else self.chunk_size

    @property
    def saved_bytes(self) -> int:
        """The RAM quota for KV states: `cache_ram_bytes`, or its default if no value was chosen during loading."""
        return DEFAULT_SAVED_BYTES if self.cache_ram_bytes is None else self.cache_ram_bytes

    @property
    def keeps_states(self) -> bool:
        """Whether KV states are saved to disk.

        States are copied to RAM before they are written to disk, so saving states to disk also requires a RAM quota.
        """
        return bool(self.cache_dir and self.cache_disk_bytes and self.saved_bytes and self.cache_prompt)

    @property
    def queue_bytes(self) -> int:
        """Maximum total size in bytes of the states that were removed from RAM and not yet written to disk."""
        return self.saved_bytes // 4 if self.keeps_states else 0

    @property
    def warm_bytes(self) -> int:
        """Maximum size in bytes of the memory that is reserved for reading states from disk."""
        return self.saved_bytes // 8 if self.keeps_states else 0

    @property
    def held_bytes(self) -> int:
        """Maximum size in bytes of the saved states in RAM.

        The total includes states that are being read from disk or waiting to be written to disk.
        """
        return self.saved_bytes + self.queue_bytes + self.warm_bytes

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The sampling parameters for requests that don't set them."""
        return self.sampling or {}

    def _check_one_of(self, name: str, known: Iterable[str]) -> None:
        value = getattr(self, name)
        if value not in known:
            raise InvalidRequest(f"{name} is {value!r}; {nearest(str(value), known)}")


Capability = Literal["generate", "chat", "embed", "rerank"]
CAPABILITIES: tuple[Capability, ...] = get_args(Capability)


@dataclass(frozen=True, slots=True)
class Uses:
    """The capabilities that a model is loaded with, and the pooling type of its embeddings."""

    capabilities: frozenset[Capability]
    pooling: Pooling = "mean"

    @property
    def generates(self) -> bool:
        """Return whether the model needs a context for generation."""
        return bool(self.capabilities & {"generate", "chat"})

    @property
    def embeds(self) -> bool:
        return "embed" in self.capabilities

    @property
    def ranks(self) -> bool:
        return "rerank" in self.capabilities
