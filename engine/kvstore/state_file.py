"""The format of state files (ADR 014). Every part of a file is verified before its bytes are used.

1. The fixed part contains the magic number, the version, the header length, the number of tokens, the first cut, the
   number of parts, the scope length, and the seed.
2. The tokens are stored as one uint32 each, followed by the scope in UTF-8.
3. The list of parts contains the number of tokens, the size in bytes and the XXH3-128 hash of the cells, followed by
   the same values for each checkpoint.
4. The digest at the end of the header is the SHA-256 hash of everything before it.
5. The data consists of the parts' bytes, up to the end of the file.

All numbers are little-endian, as on all supported processors. On one core, hashing 100 MB takes 3 ms with XXH3-128 and
55 ms with SHA-256. XXH3-128 detects damaged and swapped parts, but not forged parts. An attacker who can forge a part
already has write access to the directory.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import struct
from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from typing_extensions import Buffer
from xxhash import xxh3_128

from .keys import DIGEST_BYTES, key_and_blocks, pack_tokens
from .states import Miss, StateHead, StatePart, StoredState

MAGIC = b"cellamKV"
VERSION = 2
MAX_HEAD_BYTES = 64 << 20  # bytes, for about 16 million tokens; a longer header is damage, and gets no memory
MAX_SCOPE_BYTES = 4096  # bytes; the scope is only displayed, so longer scopes are truncated
CHUNK_BYTES = 1 << 20  # bytes; after each chunk, which takes less than 1 ms, the writer checks whether it must stop
_FIXED = struct.Struct("<8sIIIIII32s")
_PART = struct.Struct("<QQ16s")
_MISS_OF = {
    errno.ENOENT: Miss.VANISHED,
    errno.ESTALE: Miss.VANISHED,
    errno.ELOOP: Miss.FOREIGN,
    errno.EACCES: Miss.FOREIGN,
    errno.EPERM: Miss.FOREIGN,
    errno.ENXIO: Miss.FOREIGN,  # a socket
    errno.EISDIR: Miss.FOREIGN,
}
# O_NOFOLLOW refuses links. O_NONBLOCK does not wait for the other end of a pipe. O_NOATIME skips the update of the
# access time, because that update waits for the file system's journal and thus for the fsync of other files.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_NOATIME", 0)
T = TypeVar("T")


class UnusableFile(Exception):
    """Raised if the file has no usable state."""

    def __init__(self, miss: Miss) -> None:
        super().__init__(miss.value)
        self.miss = miss


# Writing


def file_bytes(state: StoredState) -> int:
    """Return the size in bytes that this state's file would have."""
    return _head_bytes(len(state.tokens), len(_scope_of(state)), 1 + len(state.checkpoints)) + state.num_bytes


def write_state(descriptor: int, state: StoredState, after_chunk: Callable[[], None]) -> StateHead:
    """Write a state to an empty file, and return its header.

    The header is written last, so a partially written file has no header. `after_chunk` may raise an exception to stop
    writing. Raises ValueError if a token is not a uint32.
    """
    packed, scope = pack_tokens(state.tokens), _scope_of(state)
    head_bytes = _head_bytes(len(state.tokens), len(scope), 1 + len(state.checkpoints))
    offset, parts = head_bytes, []
    for length, data in ((len(state.tokens), state.data), *sorted(state.checkpoints.items())):
        view = memoryview(data).cast("B")
        parts.append(StatePart(length, view.nbytes, _write_part(descriptor, view, offset, after_chunk)))
        offset += view.nbytes
    _write_all(descriptor, memoryview(_pack_head(state, packed, scope, parts)), 0)
    os.ftruncate(descriptor, offset)
    key, blocks = key_and_blocks(state.seed, packed)
    return StateHead(
        key=key,
        seed=state.seed,
        tokens=array("I", packed),
        first_cut=state.first_cut,
        scope=scope.decode("utf-8", "replace"),
        parts=tuple(parts),
        blocks=blocks,
        num_bytes=offset,
        head_bytes=head_bytes,
    )


def _scope_of(state: StoredState) -> bytes:
    return state.scope.encode("utf-8", "replace")[:MAX_SCOPE_BYTES]


def _head_bytes(num_tokens: int, scope_bytes: int, num_parts: int) -> int:
    return _FIXED.size + 4 * num_tokens + scope_bytes + num_parts * _PART.size + DIGEST_BYTES


def _pack_head(state: StoredState, packed: bytes, scope: bytes, parts: Sequence[StatePart]) -> bytes:
    count = len(packed) // 4
    length = _head_bytes(count, len(scope), len(parts))
    head = _FIXED.pack(MAGIC, VERSION, length, count, state.first_cut, len(parts), len(scope), state.seed)
    head += packed + scope + b"".join(_PART.pack(part.num_tokens, part.num_bytes, part.digest) for part in parts)
    return head + sha256(head).digest()


def _write_part(descriptor: int, view: memoryview, offset: int, after_chunk: Callable[[], None]) -> bytes:
    hashed = xxh3_128()
    for start in range(0, view.nbytes, CHUNK_BYTES):
        chunk = view[start : start + CHUNK_BYTES]
        hashed.update(chunk)
        _write_all(descriptor, chunk, offset + start)
        after_chunk()
    return hashed.digest()


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    while view.nbytes:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


# Reading


def new_memory(num_bytes: int) -> mmap.mmap:
    """Return uninitialized memory.

    Clearing a `bytearray` of 1 GB would hold the GIL for 0.3 s.
    """
    data = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            data.madvise(mmap.MADV_HUGEPAGE)
    return data


def read_head(path: Path) -> StateHead | Miss:
    """Return the header of a file that is named after its key, or a Miss if the header can't be read or verified."""
    return _read_file(path, lambda descriptor: _head_of(descriptor, path.stem))


def read_state(path: Path, max_bytes: int, memory: Callable[[int], Buffer] = new_memory) -> StoredState | Miss:
    """Return the verified state, or a Miss if the file has no usable state.

    Only the caller uses the memory that contains the state, so the caller may change it. Files of more than `max_bytes`
    bytes are not read. `memory` allocates the memory for the cells.
    """

    def read(descriptor: int) -> StoredState:
        head = _head_of(descriptor, path.stem)
        if head.num_bytes > max_bytes:
            raise UnusableFile(Miss.UNREADABLE)
        offset, data = head.head_bytes, []
        for number, part in enumerate(head.parts):
            target = new_memory(part.num_bytes) if number else memory(part.num_bytes)
            data.append(_read_part(descriptor, part, offset, target))
            offset += part.num_bytes
        cells, *checkpoints = data
        by_length = dict(zip(head.checkpoints, checkpoints, strict=True))
        return StoredState(
            seed=head.seed,
            tokens=head.tokens,
            first_cut=head.first_cut,
            data=cells,
            checkpoints=by_length,
            scope=head.scope,
        )

    return _read_file(path, read)


def _read_file(path: Path, read: Callable[[int], T]) -> T | Miss:
    try:
        descriptor = os.open(path, _READ)
        try:
            return read(descriptor)
        finally:
            os.close(descriptor)
    except UnusableFile as refused:
        return refused.miss
    except OSError as error:
        return _MISS_OF.get(error.errno or 0, Miss.UNREADABLE)
    except MemoryError:
        return Miss.UNREADABLE


def _head_of(descriptor: int, key: str) -> StateHead:
    """Return the verified header of an open file. Raises UnusableFile and OSError."""
    file = os.fstat(descriptor)
    if not stat.S_ISREG(file.st_mode) or file.st_uid != os.geteuid() or file.st_mode & 0o077:
        raise UnusableFile(Miss.FOREIGN)
    fixed = os.pread(descriptor, _FIXED.size, 0)
    if len(fixed) < _FIXED.size:
        raise UnusableFile(Miss.DAMAGED)
    magic, version, head_bytes, count, first_cut, num_parts, scope_bytes, seed = _FIXED.unpack(fixed)
    if magic != MAGIC:
        raise UnusableFile(Miss.DAMAGED)
    if version != VERSION:
        raise UnusableFile(Miss.VERSION)
    fits = head_bytes == _head_bytes(count, scope_bytes, num_parts) < min(file.st_size, MAX_HEAD_BYTES)
    if not fits or not count or first_cut > count:
        raise UnusableFile(Miss.DAMAGED)
    rest = os.pread(descriptor, head_bytes - _FIXED.size, _FIXED.size)
    if len(rest) != head_bytes - _FIXED.size or sha256(fixed + rest[:-DIGEST_BYTES]).digest() != rest[-DIGEST_BYTES:]:
        raise UnusableFile(Miss.DAMAGED)
    packed, scope = rest[: 4 * count], rest[4 * count : 4 * count + scope_bytes]
    parts = tuple(StatePart(*part) for part in _PART.iter_unpack(rest[4 * count + scope_bytes : -DIGEST_BYTES]))
    found, blocks = key_and_blocks(seed, packed)
    has_all = head_bytes + sum(part.num_bytes for part in parts) == file.st_size
    if found != key or not has_all or not _are_parts(parts, count):
        raise UnusableFile(Miss.DAMAGED)
    return StateHead(
        key=key,
        seed=seed,
        tokens=array("I", packed),
        first_cut=first_cut,
        scope=scope.decode("utf-8", "replace"),
        parts=parts,
        blocks=blocks,
        num_bytes=file.st_size,
        head_bytes=head_bytes,
    )


def _are_parts(parts: tuple[StatePart, ...], count: int) -> bool:
    """Return whether the cells cover all tokens and the checkpoints are sorted.

    The digest doesn't guarantee that these conditions hold.
    """
    lengths = [part.num_tokens for part in parts[1:]]
    in_order = lengths == sorted(set(lengths)) and all(0 < length <= count for length in lengths)
    return bool(parts) and in_order and parts[0].num_tokens == count and all(part.num_bytes for part in parts)


def _read_part(descriptor: int, part: StatePart, offset: int, data: Buffer) -> Buffer:
    view, hashed, done = memoryview(data), xxh3_128(), 0
    while done < part.num_bytes:
        count = os.preadv(descriptor, [view[done : done + CHUNK_BYTES]], offset + done)
        if not count:
            raise UnusableFile(Miss.DAMAGED)  # the file was truncated during the read
        hashed.update(view[done : done + count])
        done += count
    if hashed.digest() != part.digest:
        raise UnusableFile(Miss.DAMAGED)
    return data
