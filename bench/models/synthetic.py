"""Write GGUF files with random weights in any Llama shape, to measure speed.

python -m cellama.bench.models.synthetic 174m.gguf              the shape of the benchmarks: 174M parameters, Q8_0
python -m cellama.bench.models.synthetic x.gguf --n-embd 256 --n-layer 4 --n-head 4 --n-head-kv 4 --n-ff 768
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import gguf
import numpy as np
from numpy.typing import NDArray

FILE_TYPES = {
    "F32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "F16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "Q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
Tensor = tuple[str, tuple[int, ...]]  # name; rows and columns, or the length of a vector
NUM_BYTES, CONTROL = 256, ("<|end|>",)


@dataclass(frozen=True)
class Shape:
    """A Llama shape. The default shape has 174M parameters. For Q8_0, the row length must be a multiple of 32."""

    architecture: ClassVar[str] = "llama"
    n_embd: int = 576
    n_layer: int = 30
    n_head: int = 9
    n_head_kv: int = 3
    n_ff: int = 1760
    n_vocab: int = 49152
    n_ctx: int = 16384

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head or self.n_head % self.n_head_kv:
            raise ValueError("n_embd must be divisible by n_head, and n_head must be divisible by n_head_kv")
        if self.n_vocab < NUM_BYTES + len(CONTROL) + 1:
            raise ValueError(f"n_vocab is {self.n_vocab}; it must be {NUM_BYTES + len(CONTROL) + 1} or more")

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        """Add the shape's metadata to a file header."""
        writer.add_context_length(self.n_ctx)
        writer.add_embedding_length(self.n_embd)
        writer.add_block_count(self.n_layer)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_head_count(self.n_head)
        writer.add_head_count_kv(self.n_head_kv)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        writer.add_rope_dimension_count(self.n_embd // self.n_head)
        writer.add_vocab_size(self.n_vocab)

    @property
    def n_params(self) -> int:
        return sum(int(np.prod(dims)) for _, dims in self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """Yield the name and dimensions (rows, columns) of every tensor, in file order."""
        yield "token_embd.weight", (self.n_vocab, self.n_embd)
        for i in range(self.n_layer):
            yield f"blk.{i}.attn_norm.weight", (self.n_embd,)
            yield from self.attention(i)
            yield from self.feed_forward(i)
        yield "output_norm.weight", (self.n_embd,)
        yield "output.weight", (self.n_vocab, self.n_embd)

    def kind_of(self, name: str, dims: tuple[int, ...], wanted: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
        """Return a tensor's type in a file whose matrices have the given type."""
        return wanted if len(dims) == 2 else gguf.GGMLQuantizationType.F32

    def vector(self, rng: np.random.Generator, name: str, dims: tuple[int, ...]) -> NDArray[np.float32]:
        """Return values for norms and biases that make attention outweigh the last token."""
        return np.full(dims, 4.0 if "post_" in name else 1.0, dtype=np.float32)

    def add_tokenizer(self, writer: gguf.GGUFWriter) -> None:
        """Add byte-level BPE with one merge, which llama.cpp requires, and words that fill the vocabulary."""
        tokens = [*CONTROL, *_byte_alphabet(), "Ġt"]
        tokens += [f"w{i}" for i in range(self.n_vocab - len(tokens))]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        types = [gguf.TokenType.CONTROL] * len(CONTROL) + [gguf.TokenType.NORMAL] * (self.n_vocab - len(CONTROL))
        writer.add_token_types(types)
        writer.add_token_merges(["Ġ t"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
        writer.add_add_bos_token(False)

    def attention(self, i: int) -> Iterator[Tensor]:
        """Yield the attention tensors of layer i."""
        d_kv = self.n_embd // self.n_head * self.n_head_kv
        yield f"blk.{i}.attn_q.weight", (self.n_embd, self.n_embd)
        yield f"blk.{i}.attn_k.weight", (d_kv, self.n_embd)
        yield f"blk.{i}.attn_v.weight", (d_kv, self.n_embd)
        yield f"blk.{i}.attn_output.weight", (self.n_embd, self.n_embd)

    def feed_forward(self, i: int) -> Iterator[Tensor]:
        """Yield the feed-forward tensors of layer i."""
        yield f"blk.{i}.ffn_norm.weight", (self.n_embd,)
        yield f"blk.{i}.ffn_gate.weight", (self.n_ff, self.n_embd)
        yield f"blk.{i}.ffn_up.weight", (self.n_ff, self.n_embd)
        yield f"blk.{i}.ffn_down.weight", (self.n_embd, self.n_ff)


def write_model(path: Path, shape: Shape | None = None, *, file_type: str = "Q8_0", seed: int = 0) -> None:
    """Write the file one tensor at a time, so that only one tensor is in memory."""
    shape = shape or Shape()
    kind, label = FILE_TYPES[file_type]
    writer = gguf.GGUFWriter(path, shape.architecture)
    _add_metadata(writer, shape, label)
    for name, dims in shape.tensors():
        raw = shape.kind_of(name, dims, kind)
        stored = gguf.quant_shape_to_byte_shape(dims, raw) if raw == FILE_TYPES["Q8_0"][0] else dims
        dtype = np.dtype({"F32": np.float32, "F16": np.float16}.get(raw.name, np.uint8))
        writer.add_tensor_info(name, stored, dtype, int(np.prod(stored)) * dtype.itemsize, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for name, dims in shape.tensors():
        writer.write_tensor_data(_random_tensor(rng, shape, name, dims, shape.kind_of(name, dims, kind)))
    writer.close()


def _random_tensor(
    rng: np.random.Generator, shape: Shape, name: str, dims: tuple[int, ...], kind: gguf.GGMLQuantizationType
) -> NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint8]:
    if len(dims) == 1:
        return shape.vector(rng, name, dims)
    if name.endswith("ssm_a"):
        return -rng.random(dims, dtype=np.float32)  # how fast a state fades
    values = rng.standard_normal(dims, dtype=np.float32) / np.float32(np.sqrt(dims[1]))
    if kind == gguf.GGMLQuantizationType.F32:
        return values
    if kind == gguf.GGMLQuantizationType.F16:
        return values.astype(np.float16)
    quantized: NDArray[np.uint8] = gguf.quantize(values, kind)
    return quantized


def _add_metadata(writer: gguf.GGUFWriter, shape: Shape, label: gguf.LlamaFileType) -> None:
    writer.add_name(f"synthetic {shape.n_params / 1e6:.0f}M")
    writer.add_file_type(label)
    shape.add_metadata(writer)
    shape.add_tokenizer(writer)


def _byte_alphabet() -> list[str]:
    """Return each byte's character in byte-level BPE.

    Printable bytes represent themselves, and other bytes are represented by characters above 255.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(NUM_BYTES) if byte not in printable)
    moved = {byte: NUM_BYTES + index for index, byte in enumerate(others)}
    return [chr(moved.get(byte, byte)) for byte in range(NUM_BYTES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--file-type", choices=sorted(FILE_TYPES), default="Q8_0")
    parser.add_argument("--seed", type=int, default=0)
    for field in fields(Shape):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    args = vars(parser.parse_args())
    path, file_type, seed = args.pop("path"), args.pop("file_type"), args.pop("seed")
    shape = Shape(**args)
    write_model(path, shape, file_type=file_type, seed=seed)
    print(f"{path}: {shape.n_params / 1e6:.1f}M parameters, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
