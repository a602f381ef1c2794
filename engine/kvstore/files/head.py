"""The head of a file with a state (ADR 014): what it says of itself, checked before anything of it is used.

    fixed    magic, version, length of the head, tokens, first cut, parts, bytes of the scope, seed
    tokens   uint32 each;  scope  UTF-8
    parts    length in tokens, bytes, XXH3-128: the cells, then the checkpoints by length
    digest   SHA-256 of all before
    the parts' bytes, to the end of the file (state_file.py)

All numbers are little endian.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from cellama.engine.kvstore.keys import DIGEST_BYTES, key_and_blocks, unpack_tokens
from cellama.engine.kvstore.states import Head, KeptState, Miss, Part

MAGIC = b"cellamKV"
VERSION = 2
MAX_TOKENS = 1 << 24
MAX_PARTS = 4096
MAX_SCOPE_BYTES = 4096
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
# Neither through a link, nor waiting for who may open the other end of a pipe, nor for what is being written: to note
# the time of a look waits for the file system's journal, and so for the fsync of another file.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_NOATIME", 0)
T = TypeVar("T")


class Refused(Exception):
    """The file gives no state."""

    def __init__(self, miss: Miss) -> None:
        super().__init__(miss.value)
        self.miss = miss


def head_bytes(num_tokens: int, scope_bytes: int, num_parts: int) -> int:
    """How long a head is."""
    return _FIXED.size + 4 * num_tokens + scope_bytes + num_parts * _PART.size + DIGEST_BYTES


def pack_head(state: KeptState, packed: bytes, scope: bytes, parts: Sequence[Part]) -> bytes:
    """The head of a state's file; `packed` are its tokens."""
    count = len(packed) // 4
    counts = (count, state.first_cut, len(parts), len(scope))
    head = _FIXED.pack(MAGIC, VERSION, head_bytes(count, len(scope), len(parts)), *counts, state.seed)
    head += packed + scope + b"".join(_PART.pack(part.num_tokens, part.num_bytes, part.digest) for part in parts)
    return head + sha256(head).digest()


def read_head(path: Path) -> Head | Miss:
    """The head of a file that is named by its key. Nothing is raised, whatever the file is."""
    return guarded(path, lambda descriptor: head_of(descriptor, path.stem))


def guarded(path: Path, read: Callable[[int], T]) -> T | Miss:
    """What is read of a file, or why nothing is."""
    try:
        descriptor = os.open(path, _READ)
        try:
            return read(descriptor)
        finally:
            os.close(descriptor)
    except Refused as refused:
        return refused.miss
    except OSError as error:
        return _MISS_OF.get(error.errno or 0, Miss.UNREADABLE)
    except MemoryError:
        return Miss.UNREADABLE


def head_of(descriptor: int, key: str) -> Head:
    """The head of an open file. Raises Refused, OSError."""
    told = os.fstat(descriptor)
    if not stat.S_ISREG(told.st_mode) or told.st_uid != os.geteuid() or told.st_mode & 0o077:
        raise Refused(Miss.FOREIGN)
    fixed = os.pread(descriptor, _FIXED.size, 0)
    if len(fixed) < _FIXED.size:
        raise Refused(Miss.DAMAGED)
    magic, version, start, count, first_cut, num_parts, scope_bytes, seed = _FIXED.unpack(fixed)
    if magic != MAGIC:
        raise Refused(Miss.DAMAGED)
    if version != VERSION:
        raise Refused(Miss.VERSION)
    is_sane = 0 < count <= MAX_TOKENS and first_cut <= count and 0 < num_parts <= MAX_PARTS
    fits = start == head_bytes(count, scope_bytes, num_parts) < told.st_size
    if not is_sane or not fits or scope_bytes > MAX_SCOPE_BYTES:
        raise Refused(Miss.DAMAGED)
    rest = os.pread(descriptor, start - _FIXED.size, _FIXED.size)
    if len(rest) != start - _FIXED.size or sha256(fixed + rest[:-DIGEST_BYTES]).digest() != rest[-DIGEST_BYTES:]:
        raise Refused(Miss.DAMAGED)
    packed, scope = rest[: 4 * count], rest[4 * count : 4 * count + scope_bytes]
    parts = tuple(Part(*part) for part in _PART.iter_unpack(rest[4 * count + scope_bytes : -DIGEST_BYTES]))
    found, blocks = key_and_blocks(seed, packed)
    if found != key or not _are_parts(parts, count) or start + sum(p.num_bytes for p in parts) != told.st_size:
        raise Refused(Miss.DAMAGED)
    text = scope.decode("utf-8", "replace")
    return Head(key, seed, unpack_tokens(packed), first_cut, text, parts, blocks, told.st_size, start)


def _are_parts(parts: tuple[Part, ...], count: int) -> bool:
    """The cells have all tokens; checkpoints come in order, none twice. The digest of a head is no proof of sense."""
    lengths = [part.num_tokens for part in parts[1:]]
    in_order = lengths == sorted(set(lengths)) and all(0 < length <= count for length in lengths)
    return in_order and parts[0].num_tokens == count and all(part.num_bytes for part in parts)
