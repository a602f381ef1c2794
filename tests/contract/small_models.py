"""The smallest model shape for tests with the real llama.cpp, and options under which results are exactly equal."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, int] = {
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_head_kv": 2,
    "n_ff": 96,
    "n_vocab": 320,
    "n_ctx": 1024,
}
# llama.cpp's attention on the CPU rounds differently for chunks of different lengths. With "off" and F32, 1e-5 remain.
EXACT: dict[str, Any] = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": "off"}
