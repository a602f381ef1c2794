"""What is in a GGUF file, without loading it: its tensors, and an id of its content. Calls of gguf.h."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import llama_cpp.llama_cpp as lib

from cellama.engine.errors import ModelLoadFailed
from cellama.engine.system.split_files import part_names

WHOLE_UP_TO = 64 << 20  # bytes; smaller files are hashed from end to end
BLOCK = 4096  # bytes of each sample


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
    """A tensor as it lies in a file; `offset` from the file's beginning."""

    name: str
    offset: int
    num_bytes: int


def parts(path: Path) -> list[Path]:
    """All files of a model that is split; else the one."""
    return [path.with_name(name) for name in part_names(path.name)]


def tensors(path: Path) -> list[FileTensor]:
    """The tensors of one file, in its order. Raises ModelLoadFailed."""
    context = _open(str(path).encode(), _InitParams(True, None))
    if not context:
        raise ModelLoadFailed(f"{str(path)!r} has no GGUF header that can be read; fetch or convert the file again")
    try:
        data = _data_offset(context)
        return [
            FileTensor(_name_of(context, i).decode(), data + _offset_of(context, i), _size_of(context, i))
            for i in range(_num_tensors(context))
        ]
    finally:
        _free(context)


def fingerprint(path: Path) -> str:
    """An id of a model's content: 64 hex digits, the same wherever the file lies. Raises ModelLoadFailed.

    SHA-256 over, for each part, its size and its bytes: all of a small file; of a larger one all that comes before the
    tensors (metadata, vocabulary, shapes) and the beginning, middle and end of every tensor, 4 KiB each. Training and
    quantising change every tensor, so that they change the id; single bytes changed by hand in between do not.
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
    """Offset and length of what is hashed of a file."""
    if size <= WHOLE_UP_TO:
        yield 0, size
        return
    found = tensors(path)
    yield 0, min((tensor.offset for tensor in found), default=size)
    for tensor in found:
        last = max(0, tensor.num_bytes - BLOCK)
        for start in (0, last // 2, last):
            yield tensor.offset + start, min(BLOCK, tensor.num_bytes)
