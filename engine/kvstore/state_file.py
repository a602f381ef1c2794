"""The format of a file with a state (ADR 014). Every part is checked before a byte of it is used.

    fixed    magic, version, length of the head, tokens, first cut, parts, bytes of the scope, seed
    tokens   uint32 each;  scope  UTF-8
    parts    length in tokens, bytes, XXH3-128: the cells, then the checkpoints by length
    digest   SHA-256 of all before
    the bytes of the parts, to the end of the file

All numbers are little endian, as on every processor that is supported. Hashing 100 MB with XXH3-128 takes 3 ms of a
core, with SHA-256 55 ms. XXH3-128 finds damage and mistakes, but not forgery: whoever can forge a part can write into
the directory anyway.
"""

from __future__ import annotations

import errno
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
from .states import KeptState, Miss, StateHead, StatePart
from .warm_memory import new_memory

MAGIC = b"cellamKV"
VERSION = 2
MAX_HEAD_BYTES = 64 << 20  # a head of 16 million tokens: more is damage, and no memory is taken for it
MAX_SCOPE_BYTES = 4096  # of a name that is shown to people; longer ones are cut
CHUNK_BYTES = 1 << 20  # less than 1 ms of a core between two looks at whether the writer must stop
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
# O_NOFOLLOW: not through a link. O_NONBLOCK: without waiting for the other end of a pipe. O_NOATIME: noting the time of
# access waits for the file system's journal, and so for the fsync of another file.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_NOATIME", 0)
T = TypeVar("T")


class RefusedFile(Exception):
    """The file gives no state."""

    def __init__(self, miss: Miss) -> None:
        super().__init__(miss.value)
        self.miss = miss


# Writing


def file_bytes(state: KeptState) -> int:
    """Return how large the file of a state is."""
    return _head_bytes(len(state.tokens), len(_scope_of(state)), 1 + len(state.checkpoints)) + state.num_bytes


def write_state(descriptor: int, state: KeptState, after_chunk: Callable[[], None]) -> StateHead:
    """Write a state into an empty file and return its head, which is written last: a torn file has none.

    `after_chunk` may raise to give the file up. Raises ValueError for tokens that are not uint32.
    """
    packed, scope = pack_tokens(state.tokens), _scope_of(state)
    head_bytes = _head_bytes(len(state.tokens), len(scope), 1 + len(state.checkpoints))
    place, parts = head_bytes, []
    for length, data in ((len(state.tokens), state.data), *sorted(state.checkpoints.items())):
        view = memoryview(data).cast("B")
        parts.append(StatePart(length, view.nbytes, _write_part(descriptor, view, place, after_chunk)))
        place += view.nbytes
    _write_all(descriptor, memoryview(_pack_head(state, packed, scope, parts)), 0)
    os.ftruncate(descriptor, place)
    key, blocks = key_and_blocks(state.seed, packed)
    return StateHead(
        key=key,
        seed=state.seed,
        tokens=array("I", packed),
        first_cut=state.first_cut,
        scope=scope.decode("utf-8", "replace"),
        parts=tuple(parts),
        blocks=blocks,
        num_bytes=place,
        head_bytes=head_bytes,
    )


def _scope_of(state: KeptState) -> bytes:
    return state.scope.encode("utf-8", "replace")[:MAX_SCOPE_BYTES]


def _head_bytes(num_tokens: int, scope_bytes: int, num_parts: int) -> int:
    return _FIXED.size + 4 * num_tokens + scope_bytes + num_parts * _PART.size + DIGEST_BYTES


def _pack_head(state: KeptState, packed: bytes, scope: bytes, parts: Sequence[StatePart]) -> bytes:
    count = len(packed) // 4
    length = _head_bytes(count, len(scope), len(parts))
    head = _FIXED.pack(MAGIC, VERSION, length, count, state.first_cut, len(parts), len(scope), state.seed)
    head += packed + scope + b"".join(_PART.pack(part.num_tokens, part.num_bytes, part.digest) for part in parts)
    return head + sha256(head).digest()


def _write_part(descriptor: int, view: memoryview, place: int, after_chunk: Callable[[], None]) -> bytes:
    hashed = xxh3_128()
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


def read_head(path: Path) -> StateHead | Miss:
    """Return the head of a file that is named by its key. Nothing is raised, whatever the file is."""
    return _guarded(path, lambda descriptor: _head_of(descriptor, path.stem))


def read_state(path: Path, max_bytes: int, memory: Callable[[int], Buffer] = new_memory) -> KeptState | Miss:
    """Return the verified state in memory that the caller alone has, and may change. Nothing is raised.

    A file of more than `max_bytes` is not read. `memory` provides the memory for the cells.
    """

    def read(descriptor: int) -> KeptState:
        head = _head_of(descriptor, path.stem)
        if head.num_bytes > max_bytes:
            raise RefusedFile(Miss.UNREADABLE)
        place, data = head.head_bytes, []
        for number, part in enumerate(head.parts):
            target = new_memory(part.num_bytes) if number else memory(part.num_bytes)
            data.append(_read_part(descriptor, part, place, target))
            place += part.num_bytes
        cells, *checkpoints = data
        by_length = dict(zip(head.checkpoints, checkpoints, strict=True))
        return KeptState(
            seed=head.seed,
            tokens=head.tokens,
            first_cut=head.first_cut,
            data=cells,
            checkpoints=by_length,
            scope=head.scope,
        )

    return _guarded(path, read)


def _guarded(path: Path, read: Callable[[int], T]) -> T | Miss:
    try:
        descriptor = os.open(path, _READ)
        try:
            return read(descriptor)
        finally:
            os.close(descriptor)
    except RefusedFile as refused:
        return refused.miss
    except OSError as error:
        return _MISS_OF.get(error.errno or 0, Miss.UNREADABLE)
    except MemoryError:
        return Miss.UNREADABLE


def _head_of(descriptor: int, key: str) -> StateHead:
    """Return the head of an open file. Raises RefusedFile, OSError."""
    file = os.fstat(descriptor)
    if not stat.S_ISREG(file.st_mode) or file.st_uid != os.geteuid() or file.st_mode & 0o077:
        raise RefusedFile(Miss.FOREIGN)
    fixed = os.pread(descriptor, _FIXED.size, 0)
    if len(fixed) < _FIXED.size:
        raise RefusedFile(Miss.DAMAGED)
    magic, version, head_bytes, count, first_cut, num_parts, scope_bytes, seed = _FIXED.unpack(fixed)
    if magic != MAGIC:
        raise RefusedFile(Miss.DAMAGED)
    if version != VERSION:
        raise RefusedFile(Miss.VERSION)
    fits = head_bytes == _head_bytes(count, scope_bytes, num_parts) < min(file.st_size, MAX_HEAD_BYTES)
    if not fits or not count or first_cut > count:
        raise RefusedFile(Miss.DAMAGED)
    rest = os.pread(descriptor, head_bytes - _FIXED.size, _FIXED.size)
    if len(rest) != head_bytes - _FIXED.size or sha256(fixed + rest[:-DIGEST_BYTES]).digest() != rest[-DIGEST_BYTES:]:
        raise RefusedFile(Miss.DAMAGED)
    packed, scope = rest[: 4 * count], rest[4 * count : 4 * count + scope_bytes]
    parts = tuple(StatePart(*part) for part in _PART.iter_unpack(rest[4 * count + scope_bytes : -DIGEST_BYTES]))
    found, blocks = key_and_blocks(seed, packed)
    has_all = head_bytes + sum(part.num_bytes for part in parts) == file.st_size
    if found != key or not has_all or not _are_parts(parts, count):
        raise RefusedFile(Miss.DAMAGED)
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
    """True if the cells have all tokens, and checkpoints come in order. A right digest does not prove that."""
    lengths = [part.num_tokens for part in parts[1:]]
    in_order = lengths == sorted(set(lengths)) and all(0 < length <= count for length in lengths)
    return bool(parts) and in_order and parts[0].num_tokens == count and all(part.num_bytes for part in parts)


def _read_part(descriptor: int, part: StatePart, place: int, data: Buffer) -> Buffer:
    view, hashed, done = memoryview(data), xxh3_128(), 0
    while done < part.num_bytes:
        count = os.preadv(descriptor, [view[done : done + CHUNK_BYTES]], place + done)
        if not count:
            raise RefusedFile(Miss.DAMAGED)  # the file was cut meanwhile
        hashed.update(view[done : done + count])
        done += count
    if hashed.digest() != part.digest:
        raise RefusedFile(Miss.DAMAGED)
    return data
