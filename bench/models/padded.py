"""Make the bundled model as slow as a real model without making it less confident.

    python -m cellama.bench.models.padded big.gguf --params 160

The feed-forward part of each layer is widened, and layers are added. The added parts read and multiply random weights,
but their output weights are zero, so they don't change the result. Then all matrices are converted to Q8_0. Benchmarks
that compare texts need this model, because models with random weights have near ties, and the bundled model fits into
the CPU's cache.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from cellama.engine.bundled import TINY_PATH

Q8_0 = gguf.GGMLQuantizationType.Q8_0
N_FF = 8192  # feed-forward length of every layer of the padded model
_REPLACED = ("llama.block_count", "llama.feed_forward_length", "general.architecture", "general.file_type")
Array = NDArray[np.float16]


def write_padded(path: Path, params_m: float, *, seed: int = 0) -> None:
    """Write the bundled model, padded to about `params_m` million parameters, with matrices in Q8_0."""
    reader = gguf.GGUFReader(TINY_PATH)
    n_embd, n_layer = _value(reader, "embedding_length"), _value(reader, "block_count")
    total = max(n_layer, round(params_m * 1e6 / (3 * n_embd * N_FF)))
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in _REPLACED:
            array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if array else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_block_count(total)
    writer.add_feed_forward_length(N_FF)
    rng = np.random.default_rng(seed)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    for name, data in tensors.items():
        _add(writer, name, _widen(name, data, rng))
    for layer in range(n_layer, total):
        for name, data in tensors.items():
            if name.startswith("blk.0."):
                _add(writer, name.replace("blk.0.", f"blk.{layer}."), _silent(name, _widen(name, data, rng)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, data: Array) -> None:
    if data.ndim == 2:
        writer.add_tensor(name, gguf.quantize(data.astype(np.float32), Q8_0), raw_dtype=Q8_0)
    else:
        writer.add_tensor(name, data)


def _value(reader: gguf.GGUFReader, key: str) -> int:
    field = reader.get_field(f"llama.{key}")
    assert field is not None
    return int(field.contents())


def _widen(name: str, data: Array, rng: np.random.Generator) -> Array:
    """Return a feed-forward matrix with the new width. Added rows are random, and added columns are zero."""
    if "ffn_gate" in name or "ffn_up" in name:
        more = rng.standard_normal((N_FF - data.shape[0], data.shape[1]), dtype=np.float32)
        return np.concatenate([data, (more / np.sqrt(data.shape[1])).astype(np.float16)])
    if "ffn_down" in name:
        return np.concatenate([data, np.zeros((data.shape[0], N_FF - data.shape[1]), dtype=np.float16)], axis=1)
    return data


def _silent(name: str, data: Array) -> Array:
    """Return zeros for the output of an added layer."""
    return np.zeros_like(data) if "attn_output" in name or "ffn_down" in name else data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--params", type=float, default=160.0, help="approximate number of parameters, in millions")
    args = parser.parse_args()
    write_padded(args.path, args.params)
    print(f"{args.path}: {args.path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
