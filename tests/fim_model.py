"""The bundled model with tokens to fill in the middle of a text, which it was not trained to use."""

from __future__ import annotations

from pathlib import Path

import gguf

from cellama.engine.bundled import TINY_PATH

FIM_TOKENS = {"pre": 301, "suf": 302, "mid": 303, "rep": 304, "sep": 305}  # ordinary tokens of the bundled model


def write_fim_model(path: Path) -> None:
    """Write a copy of the bundled model whose vocabulary has these tokens."""
    reader = gguf.GGUFReader(TINY_PATH)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if array else None)
    for name, token in FIM_TOKENS.items():
        writer.add_uint32(f"tokenizer.ggml.fim_{name}_token_id", token)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
