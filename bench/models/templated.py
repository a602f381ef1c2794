"""Write the bundled model with another chat template or with a single layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf

from cellama.engine.bundled import TINY_PATH

_TEMPLATE, _NUM_LAYERS = "tokenizer.chat_template", "llama.block_count"


def write_templated(path: Path, template: str) -> None:
    """Write the bundled model with this chat template."""
    _write(path, {_TEMPLATE: template})


def write_shallow(path: Path) -> None:
    """Write the bundled model with only its first layer.

    This model computes long prompts five times as fast, but its texts are meaningless.
    """
    _write(path, {_NUM_LAYERS: 1})


def _write(path: Path, replaced: Mapping[str, Any]) -> None:
    reader = gguf.GGUFReader(TINY_PATH)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            array = field.types[0] == gguf.GGUFValueType.ARRAY
            value = replaced.get(field.name, field.contents())
            writer.add_key_value(field.name, value, field.types[0], field.types[-1] if array else None)
    for tensor in reader.tensors:
        layer = tensor.name.removeprefix("blk.").partition(".")[0]
        if not layer.isdecimal() or int(layer) < replaced.get(_NUM_LAYERS, int(layer) + 1):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
