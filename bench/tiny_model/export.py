"""Write the trained weights and the tokenizer as a GGUF file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from .corpus import END_OF_TEXT, IM_END
from .tokenizer import CONTROL_TOKENS, TAG_TOKENS

TEMPLATE = Path(__file__).with_name("template.jinja")
LONG_WINDOW = 2048  # tokens


@dataclass(frozen=True)
class TinyShape:
    """A Llama shape. `n_ctx` is the context length that the GGUF file declares."""

    n_vocab: int
    n_embd: int = 192
    n_layer: int = 5
    n_head: int = 6
    n_head_kv: int = 2
    n_ff: int = 512
    n_ctx: int = LONG_WINDOW
    rope_base: float = 10000.0
    eps: float = 1e-5


def write_gguf(path: Path, shape: TinyShape, tensors: dict[str, NDArray[np.float32]], tokenizer: Any) -> None:
    """Write matrices as F16 and vectors as F32, atomically."""
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    writer.add_name("cellama tiny")
    writer.add_license("apache-2.0")
    _add_shape(writer, shape)
    _add_tokenizer(writer, tokenizer)
    for name, value in tensors.items():
        data = value.astype(np.float16) if value.ndim == 2 else value
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)


def _add_shape(writer: gguf.GGUFWriter, shape: TinyShape) -> None:
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.n_embd // shape.n_head)
    writer.add_vocab_size(shape.n_vocab)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any) -> None:
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=lambda token: ids[token])
    kinds = dict.fromkeys(CONTROL_TOKENS, gguf.TokenType.CONTROL)
    kinds |= dict.fromkeys(TAG_TOKENS, gguf.TokenType.USER_DEFINED)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token in tokens])
    writer.add_token_merges([" ".join(merge) if isinstance(merge, list) else merge for merge in merges])
    writer.add_bos_token_id(ids[END_OF_TEXT])
    writer.add_eos_token_id(ids[IM_END])
    writer.add_eot_token_id(ids[IM_END])
    writer.add_eom_token_id(ids[END_OF_TEXT])
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE.read_text())
