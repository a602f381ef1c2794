"""Write the bundled model with another chat template."""

from __future__ import annotations

from pathlib import Path

import gguf

from cellama.engine.bundled import TINY_PATH

_TEMPLATE = "tokenizer.chat_template"


def write_templated(path: Path, template: str) -> None:
    """Write the bundled model with this chat template."""
    reader = gguf.GGUFReader(TINY_PATH)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in (_TEMPLATE, "general.architecture"):
            array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if array else None)
    writer.add_chat_template(template)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
