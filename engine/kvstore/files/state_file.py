"""The format of a file with a state (ADR 014): all is checked before a byte of it is used.

    fixed    magic, version, length of the head, tokens, first cut, parts, bytes of the scope, seed
    tokens   uint32 each;  scope  UTF-8
    parts    length in tokens, bytes, SHA-256: the cells, then the checkpoints by length
    digest   SHA-256 of all before
    the parts' bytes, to the end of the file

All numbers are little endian. SHA-256 takes 0.055 s of a core for 100 MB where the processor has instructions for it
(blake2b 0.085 s, CRC-32 0.016 s): as fast as memory is copied, and no other bytes have the same.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import struct
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from typing_extensions import Buffer

from cellama.engine.kvstore.keys import DIGEST_BYTES, key_and_blocks, pack_tokens, unpack_tokens
from cellama.engine.kvstore.states import Head, KeptState, Miss, Part

MAGIC = b"cellamKV"
VERSION = 1
CHUNK_BYTES = 1 << 20  # under 1 ms of a core: what a writer does between two looks at the engine
MAX_TOKENS = 1 << 24
MAX_PARTS = 4096
MAX_SCOPE_BYTES = 4096
_FIXED = struct.Struct("<8sIIIIII32s")
_PART = struct.Struct("<QQ32s")
_MISS_OF = {
    errno.ENOENT: Miss.VANISHED,
    errno.ESTALE: Miss.VANISHED,
    errno.ELOOP: Miss.FOREIGN,
    errno.EACCES: Miss.FOREIGN,
    errno.EPERM: Miss.FOREIGN,
    errno.ENXIO: Miss.FOREIGN,  # a socket
    errno.EISDIR: Miss.FOREIGN,
}


# Neither through a link, nor waiting for who may open the other end of a pipe, nor for what is being written: to note
# the time of a look waits for the file system's journal, and so for the fsync of another file.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_NOATIME", 0)
T = TypeVar("T")


class _Refused(Exception):
    def __init__(self, miss: Miss) -> None:
        super().__init__(miss.value)
        self.miss = miss


# Writing


def file_bytes(state: KeptState) -> int:
    """How large the file of a state is."""
    return _head_bytes(len(state.tokens), len(_scope_of(state)), 1 + len(state.checkpoints)) + state.num_bytes


def write_state(descriptor: int, state: KeptState, after_chunk: Callable[[], None]) -> Head:
    """Writes a state into an empty file; the head comes last: a torn file has none. `after_chunk` may raise to end it.

    ValueError for what is no state.
    """
    packed, scope = pack_tokens(state.tokens), _scope_of(state)
    _check(state, packed)
    start = _head_bytes(len(state.tokens), len(scope), 1 + len(state.checkpoints))
    place, parts = start, []
    for length, data in ((len(state.tokens), state.data), *sorted(state.checkpoints.items())):
        view = memoryview(data).cast("B")
        parts.append(Part(length, view.nbytes, _write_part(descriptor, view, place, after_chunk)))
        place += view.nbytes
    counts = (len(state.tokens), state.first_cut, len(parts), len(scope))
    head = _FIXED.pack(MAGIC, VERSION, start, *counts, state.seed)
    head += packed + scope + b"".join(_PART.pack(part.num_tokens, part.num_bytes, part.digest) for part in parts)
    _write_all(descriptor, memoryview(head + sha256(head).digest()), 0)
    os.ftruncate(descriptor, place)
    key, blocks = key_and_blocks(state.seed, packed)
    tokens = unpack_tokens(packed)
    return Head(
        key, state.seed, tokens, state.first_cut, scope.decode("utf-8", "replace"), tuple(parts), blocks, place, start
    )


def _check(state: KeptState, packed: bytes) -> None:
    count = len(packed) // 4
    lengths = sorted(state.checkpoints)
    if not 0 < count <= MAX_TOKENS or not 0 <= state.first_cut <= count or len(state.seed) != DIGEST_BYTES:
        raise ValueError(f"{count} tokens, to be cut from {state.first_cut} on: that is no state")
    if len(lengths) >= MAX_PARTS or any(not 0 < length <= count for length in lengths):
        raise ValueError(f"checkpoints at {lengths[:8]}… of {count} tokens")
    if not all(memoryview(part).nbytes for part in (state.data, *state.checkpoints.values())):
        raise ValueError("a part of the state is empty")


def _write_part(descriptor: int, view: memoryview, place: int, after_chunk: Callable[[], None]) -> bytes:
    hashed = sha256()
    for start in range(0, view.nbytes, CHUNK_BYTES):
        chunk = view[start : start + CHUNK_BYTES]
        hashed.update(chunk)
        _write_all(descriptor, chunk, place + start)
        after_chunk()
    return hashed.digest()


def _write_all(descriptor: int, view: memoryview, place: int) -> None:
    while view.nbytes:
        count = os.pwrite(descriptor, view, place)
        view, place = view[count:], place + count


# Reading


def read_head(path: Path) -> Head | Miss:
    """The head of a file that is named by its key. Nothing is raised, whatever the file is."""
    return _guarded(path, lambda descriptor: _read_head(descriptor, path.stem))


def read_state(path: Path, most_bytes: int) -> KeptState | Miss:
    """Everything, verified. A file of more than `most_bytes` is not read. Nothing is raised, whatever the file is."""

    def read(descriptor: int) -> KeptState:
        head = _read_head(descriptor, path.stem)
        if head.num_bytes > most_bytes:
            raise _Refused(Miss.UNREADABLE)
        place = head.head_bytes
        parts: dict[int, Buffer] = {}
        first, *others = head.parts
        cells = _read_part(descriptor, first, place)
        place += first.num_bytes
        for part in others:
            parts[part.num_tokens] = _read_part(descriptor, part, place)
            place += part.num_bytes
        return KeptState(head.seed, head.tokens, head.first_cut, cells, parts, head.scope)

    return _guarded(path, read)


def _guarded(path: Path, read: Callable[[int], T]) -> T | Miss:
    try:
        descriptor = os.open(path, _READ)
        try:
            return read(descriptor)
        finally:
            os.close(descriptor)
    except _Refused as refused:
        return refused.miss
    except OSError as error:
        return _MISS_OF.get(error.errno or 0, Miss.UNREADABLE)
    except MemoryError:
        return Miss.UNREADABLE


def _read_head(descriptor: int, key: str) -> Head:
    told = os.fstat(descriptor)
    if not stat.S_ISREG(told.st_mode) or told.st_uid != os.geteuid() or told.st_mode & 0o077:
        raise _Refused(Miss.FOREIGN)
    fixed = os.pread(descriptor, _FIXED.size, 0)
    if len(fixed) < _FIXED.size:
        raise _Refused(Miss.DAMAGED)
    magic, version, head_bytes, count, first_cut, num_parts, scope_bytes, seed = _FIXED.unpack(fixed)
    if magic != MAGIC:
        raise _Refused(Miss.DAMAGED)
    if version != VERSION:
        raise _Refused(Miss.VERSION)
    is_sane = 0 < count <= MAX_TOKENS and first_cut <= count and 0 < num_parts <= MAX_PARTS
    fits = head_bytes == _head_bytes(count, scope_bytes, num_parts) < told.st_size
    if not is_sane or not fits or scope_bytes > MAX_SCOPE_BYTES:
        raise _Refused(Miss.DAMAGED)
    rest = os.pread(descriptor, head_bytes - _FIXED.size, _FIXED.size)
    if len(rest) != head_bytes - _FIXED.size or sha256(fixed + rest[:-DIGEST_BYTES]).digest() != rest[-DIGEST_BYTES:]:
        raise _Refused(Miss.DAMAGED)
    packed, scope = rest[: 4 * count], rest[4 * count : 4 * count + scope_bytes]
    parts = tuple(Part(*part) for part in _PART.iter_unpack(rest[4 * count + scope_bytes : -DIGEST_BYTES]))
    found, blocks = key_and_blocks(seed, packed)
    if found != key or not _are_parts(parts, count) or head_bytes + sum(p.num_bytes for p in parts) != told.st_size:
        raise _Refused(Miss.DAMAGED)
    text = scope.decode("utf-8", "replace")
    return Head(key, seed, unpack_tokens(packed), first_cut, text, parts, blocks, told.st_size, head_bytes)


def _are_parts(parts: tuple[Part, ...], count: int) -> bool:
    """The cells have all tokens; checkpoints come in order, none twice. The digest of a head is no proof of sense."""
    lengths = [part.num_tokens for part in parts[1:]]
    in_order = lengths == sorted(set(lengths)) and all(0 < length <= count for length in lengths)
    return in_order and parts[0].num_tokens == count and all(part.num_bytes for part in parts)


def _read_part(descriptor: int, part: Part, place: int) -> mmap.mmap:
    """Into memory that no other thread waits for: Python clears a `bytearray` under its lock, 0.3 s for 1 GB."""
    data = mmap.mmap(-1, part.num_bytes)  # at most what the file has
    view, hashed, done = memoryview(data), sha256(), 0
    while done < part.num_bytes:
        count = os.preadv(descriptor, [view[done : done + CHUNK_BYTES]], place + done)
        if not count:
            raise _Refused(Miss.DAMAGED)  # it was cut meanwhile
        hashed.update(view[done : done + count])
        done += count
    if hashed.digest() != part.digest:
        raise _Refused(Miss.DAMAGED)
    return data


def _head_bytes(num_tokens: int, scope_bytes: int, num_parts: int) -> int:
    return _FIXED.size + 4 * num_tokens + scope_bytes + num_parts * _PART.size + DIGEST_BYTES


def _scope_of(state: KeptState) -> bytes:
    return state.scope.encode("utf-8", "replace")[:MAX_SCOPE_BYTES]
