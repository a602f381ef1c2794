"""The options of a model, for type checkers.

.ci/typed_tasks.py writes this file from `ModelSettings`. Do not edit it; run the script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from typing_extensions import TypedDict

from .settings import CacheType, Capability


class ModelOptions(TypedDict, total=False):
    """All settings of a model except `id`, `source` and `default`. If a value is None, cellama chooses it."""

    n_gpu_layers: int | Literal["auto"] | None
    devices: Sequence[str] | None
    split_mode: Literal["none", "layer", "row", "tensor"]
    tensor_split: Sequence[float] | None
    main_gpu: int
    n_cpu_moe: int
    override_tensors: Sequence[str]
    kv_offload: bool
    rpc: Sequence[str]
    rpc_public: bool
    use_mmap: bool
    use_mlock: bool
    kv_overrides: Mapping[str, bool | int | float | str] | None
    rope_scaling: Literal["none", "linear", "yarn", "longrope"] | None
    rope_freq_base: float | None
    rope_freq_scale: float | None
    yarn_orig_ctx: int | None
    yarn_ext_factor: float | None
    yarn_attn_factor: float | None
    yarn_beta_fast: float | None
    yarn_beta_slow: float | None
    hub_cache_dir: str | None
    hub_token: str | None
    hub_force: bool
    hub_offline: bool
    capabilities: Sequence[Capability] | None
    adapters: Mapping[str, str | Mapping[str, object]]
    n_parallel: int | Literal["auto"] | None
    n_ctx: int | None
    ctx_per_slot: int | None
    kv_layout: Literal["auto", "unified", "partitioned"]
    cache_prompt: bool
    cache_ram_bytes: int | Literal["auto"] | None
    cache_dir: str | None
    cache_disk_bytes: int | None
    n_batch: int
    n_ubatch: int | Literal["auto"] | None
    chunk_size: int | Literal["auto"] | None
    bulk_share: float
    threads: int | Literal["auto"] | None
    flash_attention: Literal["auto", "on", "off"]
    cache_type_k: CacheType
    cache_type_v: CacheType
    speculation: Literal["auto", "off"]
    draft: str | None
    pooling: Literal["auto", "mean", "cls", "last", "none", "rank"]
    control_tokens_in_text: bool
    sampling: Mapping[str, object] | None
    logits_processors: Sequence[str]
    batch_strategy: str
    on_demand: bool
    keep_alive_s: int
    preload: bool
    pinned: bool
