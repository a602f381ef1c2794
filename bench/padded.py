"""Makes the bundled model as slow as a real one without changing what it writes.

    python -m cellama.bench.padded big.gguf --params 150

Extra layers read and multiply random weights (Q8_0) like any layer, but their output matrices are zero, so they add nothing.
Benchmarks that compare texts need this: random-weight models have near ties, and the bundled one fits into the CPU's cache.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from cellama.engine.bundled import TINY_PATH

Q8_0 = gguf.GGMLQuantizationType.Q8_0
EXTRA_FF = 8192  # width of the extra layers
_REPLACED = ("llama.block_count", "llama.feed_forward_length", "general.architecture")


def write_padded(path: Path, params_m: float, *, seed: int = 0) -> None:
    """Writes the bundled model with extra layers up to about `params_m` million parameters."""
    reader = gguf.GGUFReader(TINY_PATH)
    n_embd, n_layer, n_ff = (
        int(_value(reader, key)) for key in ("embedding_length", "block_count", "feed_forward_length")
    )
    d_kv = n_embd // int(_value(reader, "attention.head_count")) * int(_value(reader, "attention.head_count_kv"))
    per_layer = 2 * n_embd * n_embd + 2 * n_embd * d_kv + 3 * n_embd * EXTRA_FF
    extra = max(0, round(params_m * 1e6 / per_layer))
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in _REPLACED:
            array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if array else None)
    writer.add_block_count(n_layer + extra)
    writer.add_feed_forward_length([n_ff] * n_layer + [EXTRA_FF] * extra)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    rng = np.random.default_rng(seed)
    for layer in range(n_layer, n_layer + extra):
        _add_layer(writer, layer, n_embd, d_kv, rng)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _value(reader: gguf.GGUFReader, key: str) -> int:
    field = reader.get_field(f"llama.{key}")
    assert field is not None
    return int(field.contents())


def _add_layer(writer: gguf.GGUFWriter, layer: int, n_embd: int, d_kv: int, rng: np.random.Generator) -> None:
    shapes = {"attn_q": (n_embd, n_embd), "attn_k": (d_kv, n_embd), "attn_v": (d_kv, n_embd)}
    shapes |= {"ffn_gate": (EXTRA_FF, n_embd), "ffn_up": (EXTRA_FF, n_embd)}
    zeros = {"attn_output": (n_embd, n_embd), "ffn_down": (n_embd, EXTRA_FF)}
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(n_embd, dtype=np.float32))
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(n_embd))
        _add_quantized(writer, f"blk.{layer}.{name}.weight", values)
    for name, shape in zeros.items():
        _add_quantized(writer, f"blk.{layer}.{name}.weight", np.zeros(shape, dtype=np.float32))


def _add_quantized(writer: gguf.GGUFWriter, name: str, values: NDArray[np.float32]) -> None:
    writer.add_tensor(name, gguf.quantize(values, Q8_0), raw_dtype=Q8_0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--params", type=float, default=150.0, help="millions of parameters in all, about")
    args = parser.parse_args()
    write_padded(args.path, args.params)
    print(f"{args.path}: {args.path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
