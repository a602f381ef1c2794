"""Write LoRA adapters with random weights for the models of bench/models/synthetic.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cellama.bench.models.synthetic import Shape


def shape_of(model: Path) -> Shape:
    """The shape of a Llama file."""
    reader = gguf.GGUFReader(model)

    def number(key: str) -> int:
        return int(reader.get_field(f"llama.{key}").contents())

    return Shape(
        n_embd=number("embedding_length"),
        n_layer=number("block_count"),
        n_head=number("attention.head_count"),
        n_head_kv=number("attention.head_count_kv"),
        n_ff=number("feed_forward_length"),
        n_vocab=number("vocab_size"),
        n_ctx=number("context_length"),
    )


def write_adapter(
    path: Path, shape: Shape | None = None, *, rank: int = 8, seed: int = 0, strength: float = 1.0, **metadata: Any
) -> None:
    """Write an F16 adapter for all matrices of the blocks. Its alpha is the rank.

    `strength` is roughly the size of the adapter's contribution relative to the weights. `metadata` replaces keys of
    the file: `architecture`, `type`, `kind` ("lora"), `invocation_tokens` (which make it an aLoRA).
    """
    shape = shape or Shape()
    writer = gguf.GGUFWriter(path, metadata.get("architecture", shape.architecture))
    _add_metadata(writer, rank, metadata)
    rng = np.random.default_rng(seed)
    for name, dims in shape.tensors():
        if len(dims) == 2 and name.startswith("blk."):
            rows, columns = dims
            a = rng.standard_normal((rank, columns)) / np.sqrt(columns)
            b = rng.standard_normal((rows, rank)) * strength / np.sqrt(rank)
            writer.add_tensor(f"{name}.lora_a", a.astype(np.float16))
            writer.add_tensor(f"{name}.lora_b", b.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_metadata(writer: gguf.GGUFWriter, rank: int, metadata: Mapping[str, Any]) -> None:
    writer.add_type(metadata.get("type", gguf.GGUFType.ADAPTER))
    writer.add_string(gguf.Keys.Adapter.TYPE, metadata.get("kind", "lora"))
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(rank))
    if "invocation_tokens" in metadata:
        writer.add_array(gguf.Keys.Adapter.ALORA_INVOCATION_TOKENS, metadata["invocation_tokens"])
