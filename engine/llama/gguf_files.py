"""Read the GGUF files of models and adapters without loading them.

ggml (gguf.h) lists a model's tensors, from which the model's fingerprint is computed. An adapter's header is parsed in
Python, because llama.cpp aborts the process if the header is malformed. The format is described in ggml's docs/gguf.md.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import llama_cpp.llama_cpp as lib

from cellama.engine.errors import AdapterLoadFailed, ModelLoadFailed
from cellama.engine.system.split_files import part_names

MAX_WHOLE_BYTES = 64 << 20  # maximum size in bytes of a model file that is hashed completely
BLOCK = 4096  # bytes of each sample of a larger file
ALORA_KEY = "adapter.alora.invocation_tokens"
TENSOR_TYPES = {0: "F32", 1: "F16", 8: "Q8_0", 30: "BF16"}  # the types that llama.cpp's converter writes
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_COUNT = 1 << 20  # keys, tensors, or bytes of a name; a larger number means that the file is damaged


# Models


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


_open = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p, _InitParams)(("gguf_init_from_file", lib._lib))
_free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(("gguf_free", lib._lib))
_data_offset = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p)(("gguf_get_data_offset", lib._lib))
_num_tensors = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(("gguf_get_n_tensors", lib._lib))
_name_of = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64)(("gguf_get_tensor_name", lib._lib))
_offset_of = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int64)(("gguf_get_tensor_offset", lib._lib))
_size_of = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int64)(("gguf_get_tensor_size", lib._lib))


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file. `offset` is relative to the start of the file."""

    name: str
    offset: int
    num_bytes: int


def parts(path: Path) -> list[Path]:
    """Return all files of a split model, or the only file of an unsplit model."""
    return [path.with_name(name) for name in part_names(path.name)]


def tensors(path: Path) -> list[FileTensor]:
    """Return the tensors in one file, in file order. Raises ModelLoadFailed."""
    context = _open(str(path).encode(), _InitParams(True, None))
    if not context:
        raise ModelLoadFailed(f"{str(path)!r} has no readable GGUF header; download or convert it again")
    try:
        data = _data_offset(context)
        return [
            FileTensor(_name_of(context, i).decode(), data + _offset_of(context, i), _size_of(context, i))
            for i in range(_num_tensors(context))
        ]
    finally:
        _free(context)


def fingerprint(path: Path) -> str:
    """Return an id that depends on a model's content, but not on its path. Raises ModelLoadFailed.

    The id consists of 64 hexadecimal digits. The id is a SHA-256 hash of the size and the bytes of each part. Small
    files are hashed completely. For larger files, the hash covers everything before the tensors (metadata, vocabulary,
    shapes), and 4 KiB each from the start, middle and end of every tensor. Training and quantizing change every tensor,
    and therefore the id. Editing single bytes by hand may leave the id unchanged.
    """
    digest = hashlib.sha256()
    for part in parts(path):
        size = part.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with part.open("rb") as file:
            for offset, num_bytes in _samples(part, size):
                file.seek(offset)
                digest.update(file.read(num_bytes))
    return digest.hexdigest()


def _samples(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """Yield the offset and length of each range of a file that must be hashed."""
    if size <= MAX_WHOLE_BYTES:
        yield 0, size
        return
    found = tensors(path)
    yield 0, min((tensor.offset for tensor in found), default=size)
    for tensor in found:
        last = max(0, tensor.num_bytes - BLOCK)
        for start in (0, last // 2, last):
            yield tensor.offset + start, min(BLOCK, tensor.num_bytes)


# Adapters


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's name, its dimensions in ggml's order, and its type number."""

    name: str
    dims: tuple[int, ...]
    kind: int


def check_adapter_file(path: Path, architecture: str) -> None:
    """Raise AdapterLoadFailed unless the file is a LoRA adapter for models of this architecture.

    This check rejects files that would make llama.cpp abort the process. llama.cpp itself compares the adapter's shapes
    with the model's, and logs a readable error.
    """
    try:
        with path.open("rb") as file:
            metadata, tensors = _AdapterHeader(file).read()
    except (struct.error, UnicodeDecodeError, KeyError, OverflowError, OSError) as error:
        raise _refused(path, f"is damaged or incomplete ({error}); download or convert it again") from None
    _check_metadata(path, metadata, architecture)
    if not tensors:
        raise _refused(path, "has no tensors; convert the adapter again")
    for tensor in tensors:
        _check_tensor(path, tensor)
    _check_embedding(path, {tensor.name: tensor for tensor in tensors})


def _refused(path: Path, problem: str) -> AdapterLoadFailed:
    return AdapterLoadFailed(f"{str(path)!r} {problem}")


def _check_metadata(path: Path, metadata: dict[str, tuple[int, Any]], architecture: str) -> None:
    for key in ("general.type", "general.architecture", "adapter.type"):
        if metadata.get(key, (_STRING,))[0] != _STRING:
            raise _refused(path, f"has a {key} that is not a string; convert the adapter again")
    kind = metadata.get("general.type", (_STRING, None))[1]
    if kind != "adapter":
        reason = f"its general.type is {kind!r}" if kind else "it has no general.type"
        raise _refused(path, f"is not an adapter ({reason}); use the GGUF file of a LoRA adapter")
    made_for = metadata.get("general.architecture", (_STRING, "no architecture"))[1]
    if made_for != architecture:
        raise _refused(
            path, f"is an adapter for {made_for}, but the model is {architecture}; use an adapter made for this model"
        )
    if metadata.get("adapter.type", (_STRING, None))[1] != "lora":
        adapter_type = metadata.get("adapter.type", (0, None))[1]
        raise _refused(path, f"is an adapter of type {adapter_type!r}; use an adapter of type 'lora'")
    if metadata.get("adapter.lora.alpha", (_FLOAT32,))[0] != _FLOAT32:
        raise _refused(path, "has an adapter.lora.alpha that is not a float32; convert the adapter again")
    if ALORA_KEY in metadata:
        raise _refused(
            path, "is an aLoRA, which is activated by invocation tokens and is not supported; use a plain LoRA adapter"
        )


def _check_tensor(path: Path, tensor: TensorInfo) -> None:
    if tensor.kind not in TENSOR_TYPES:
        known = ", ".join(TENSOR_TYPES.values())
        raise _refused(path, f"has tensor {tensor.name!r} of type {tensor.kind}, which is not supported; use {known}")
    is_pair = tensor.name.endswith((".lora_a", ".lora_b"))
    if is_pair and len(tensor.dims) != 2 and "_exps." not in tensor.name:
        raise _refused(
            path,
            f"has tensor {tensor.name!r} with {len(tensor.dims)} dimensions instead of 2; convert the adapter again",
        )
    if not all(tensor.dims):
        raise _refused(path, f"has an empty tensor {tensor.name!r}; convert the adapter again")


def _check_embedding(path: Path, tensors: dict[str, TensorInfo]) -> None:
    """Raise AdapterLoadFailed if the ranks of the token embedding's two matrices differ.

    The matrices are stored transposed, and llama.cpp doesn't check their ranks.
    """
    a, b = (tensors.get(f"token_embd.weight.lora_{side}") for side in "ab")
    if a is not None and b is not None and a.dims[0] != b.dims[0]:
        ranks = f"{a.dims[0]} and {b.dims[0]}"
        raise _refused(path, f"has different ranks {ranks} for token_embd.weight; convert the adapter again")


class _AdapterHeader:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._readers: dict[int, Callable[[], Any]] = {_STRING: self._text, _ARRAY: self._array}

    def read(self) -> tuple[dict[str, tuple[int, Any]], list[TensorInfo]]:
        """Return the tensors, and the metadata with the type and value of each key.

        If the file is damaged, this raises struct.error, KeyError, OverflowError or another exception.
        """
        _magic, _version, num_tensors, num_keys = self._unpack("4sIQQ")
        metadata = {}
        for _ in range(_checked_count(num_keys)):
            key, (kind,) = self._text(), self._unpack("I")
            metadata[key] = (kind, self._value(kind))
            if key == "general.type" and metadata[key][1] != "adapter":
                return metadata, []  # possibly a model, whose long vocabulary need not be read
        return metadata, [self._tensor() for _ in range(_checked_count(num_tensors))]

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
        return self._unpack(f"{_checked_count(length)}s")[0].decode()  # type: ignore[no-any-return]

    def _array(self) -> None:
        """Skip an array, because no check needs the contents of arrays."""
        kind, length = self._unpack("IQ")
        if kind in _FORMATS:
            self._file.seek(length * struct.calcsize(_FORMATS[kind]), 1)
            return
        for _ in range(_checked_count(length)):
            self._value(kind)

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        layout = "<" + layout
        return struct.unpack(layout, self._file.read(struct.calcsize(layout)))


def _checked_count(count: int) -> int:
    if count > _MAX_COUNT:
        raise OverflowError(f"the count {count} is too large")
    return count
