"""Reads the head of a LoRA adapter's GGUF file, and refuses what llama.cpp would end the process for.

Format: ggml's docs/gguf.md. llama.cpp itself compares shapes with those of the model, in words that can be quoted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cellama.engine.errors import AdapterLoadFailed

ALORA_KEY = "adapter.alora.invocation_tokens"
TENSOR_TYPES = {0: "F32", 1: "F16", 8: "Q8_0", 30: "BF16"}  # those that llama.cpp's converter writes
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_COUNT = 1 << 20  # of keys, of tensors, of bytes in a name: more is a damaged file


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: its dimensions in ggml's order, the number of its type."""

    name: str
    dims: tuple[int, ...]
    kind: int


def check_adapter_file(path: Path, architecture: str) -> None:
    """Raises AdapterLoadFailed unless the file is a LoRA adapter for models of this architecture."""
    try:
        with path.open("rb") as file:
            metadata, tensors = _Reader(file).head()
    except (struct.error, UnicodeDecodeError, KeyError, OverflowError, OSError) as error:
        raise _refused(path, f"is damaged or cut off ({error}); fetch or convert it again") from None
    _check_metadata(path, metadata, architecture)
    if not tensors:
        raise _refused(path, "has no tensors; convert it again")
    for tensor in tensors:
        _check_tensor(path, tensor)
    _check_embedding(path, {tensor.name: tensor for tensor in tensors})


def _refused(path: Path, what: str) -> AdapterLoadFailed:
    return AdapterLoadFailed(f"{str(path)!r} {what}")


def _check_metadata(path: Path, metadata: dict[str, tuple[int, Any]], architecture: str) -> None:
    for key in ("general.type", "general.architecture", "adapter.type"):
        if metadata.get(key, (_STRING,))[0] != _STRING:
            raise _refused(path, f"has no text as {key}; convert it again")
    kind = metadata.get("general.type", (_STRING, None))[1]
    if kind != "adapter":
        what = f"general.type is {kind!r}" if kind else "it has no general.type"
        raise _refused(path, f"is no adapter ({what}); give the GGUF file of a LoRA adapter")
    made_for = metadata.get("general.architecture", (_STRING, "no architecture"))[1]
    if made_for != architecture:
        raise _refused(path, f"is an adapter for {made_for}, the model is of {architecture}; take one made for it")
    if metadata.get("adapter.type", (_STRING, None))[1] != "lora":
        raise _refused(path, f"is an adapter of type {metadata.get('adapter.type', (0, None))[1]!r}, not 'lora'")
    if metadata.get("adapter.lora.alpha", (_FLOAT32,))[0] != _FLOAT32:
        raise _refused(path, "has no float32 as adapter.lora.alpha; convert it again")
    if ALORA_KEY in metadata:
        raise _refused(
            path, "is an aLoRA, which begins at invocation tokens; that is not supported: use a plain LoRA adapter"
        )


def _check_tensor(path: Path, tensor: TensorInfo) -> None:
    if tensor.kind not in TENSOR_TYPES:
        known = ", ".join(TENSOR_TYPES.values())
        raise _refused(path, f"has tensor {tensor.name!r} of type {tensor.kind}; it must be one of {known}")
    is_pair = tensor.name.endswith((".lora_a", ".lora_b"))
    if is_pair and len(tensor.dims) != 2 and "_exps." not in tensor.name:
        raise _refused(path, f"has tensor {tensor.name!r} with {len(tensor.dims)} dimensions instead of 2")
    if not all(tensor.dims):
        raise _refused(path, f"has an empty tensor {tensor.name!r}")


def _check_embedding(path: Path, tensors: dict[str, TensorInfo]) -> None:
    """llama.cpp compares the ranks of all pairs but that of the embedding, which is stored the other way round."""
    a, b = (tensors.get(f"token_embd.weight.lora_{side}") for side in "ab")
    if a is not None and b is not None and a.dims[0] != b.dims[0]:
        raise _refused(path, f"has ranks {a.dims[0]} and {b.dims[0]} for token_embd.weight; convert it again")


class _Reader:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._readers: dict[int, Callable[[], Any]] = {_STRING: self._text, _ARRAY: self._array}

    def head(self) -> tuple[dict[str, tuple[int, Any]], list[TensorInfo]]:
        """Keys with type and value, and the tensors. Raises struct.error, KeyError or others for a damaged file."""
        _magic, _version, num_tensors, num_keys = self._unpack("4sIQQ")
        metadata = {}
        for _ in range(_sane(num_keys)):
            key, (kind,) = self._text(), self._unpack("I")
            metadata[key] = (kind, self._value(kind))
            if key == "general.type" and metadata[key][1] != "adapter":
                return metadata, []  # a model, perhaps, with a long vocabulary
        return metadata, [self._tensor() for _ in range(_sane(num_tensors))]

    def _tensor(self) -> TensorInfo:
        name, (num_dims,) = self._text(), self._unpack("I")
        dims = self._unpack(f"{min(num_dims, 8)}Q")
        kind, _offset = self._unpack("IQ")
        return TensorInfo(name, tuple(dims), kind)

    def _value(self, kind: int) -> Any:
        reader = self._readers.get(kind)
        return reader() if reader else self._unpack(_FORMATS[kind])[0]

    def _text(self) -> str:
        (length,) = self._unpack("Q")
        return self._unpack(f"{_sane(length)}s")[0].decode()  # type: ignore[no-any-return]

    def _array(self) -> None:
        """Skips an array: nothing here needs one."""
        kind, length = self._unpack("IQ")
        if kind in _FORMATS:
            self._file.seek(length * struct.calcsize(_FORMATS[kind]), 1)
            return
        for _ in range(_sane(length)):
            self._value(kind)

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        layout = "<" + layout
        return struct.unpack(layout, self._file.read(struct.calcsize(layout)))


def _sane(count: int) -> int:
    if count > _MAX_COUNT:
        raise OverflowError(f"a count of {count}")
    return count
