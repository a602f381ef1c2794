"""Writes and reads files with states (ADR 014): every part is checked before a byte of it is used.

XXH3-128 takes 3 ms of a core for 100 MB in a processor's cache, where SHA-256 takes 55, and as good as never finds two
parts alike that differ by damage or mistake. Who wants to forge one must be able to write into the folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from typing_extensions import Buffer
from xxhash import xxh3_128

from cellama.engine.kvstore.keys import DIGEST_BYTES, key_and_blocks, pack_tokens, unpack_tokens
from cellama.engine.kvstore.spare import new_memory
from cellama.engine.kvstore.states import Head, KeptState, Miss, Part

from .head import MAX_PARTS, MAX_SCOPE_BYTES, MAX_TOKENS, Refused, guarded, head_bytes, head_of, pack_head

CHUNK_BYTES = 1 << 20  # under 1 ms of a core: what a writer does between two looks at the engine


# Writing


def file_bytes(state: KeptState) -> int:
    """How large the file of a state is."""
    return head_bytes(len(state.tokens), len(_scope_of(state)), 1 + len(state.checkpoints)) + state.num_bytes


def write_state(descriptor: int, state: KeptState, after_chunk: Callable[[], None]) -> Head:
    """Writes a state into an empty file; the head comes last: a torn file has none. `after_chunk` may raise to end it.

    ValueError for what is no state.
    """
    packed, scope = pack_tokens(state.tokens), _scope_of(state)
    _check(state, packed)
    start = head_bytes(len(state.tokens), len(scope), 1 + len(state.checkpoints))
    place, parts = start, []
    for length, data in ((len(state.tokens), state.data), *sorted(state.checkpoints.items())):
        view = memoryview(data).cast("B")
        parts.append(Part(length, view.nbytes, _write_part(descriptor, view, place, after_chunk)))
        place += view.nbytes
    _write_all(descriptor, memoryview(pack_head(state, packed, scope, parts)), 0)
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


def read_state(path: Path, most_bytes: int, memory: Callable[[int], Buffer] = new_memory) -> KeptState | Miss:
    """Everything, verified, in memory that is the caller's alone, to be changed. Nothing is raised, whatever it is.

    A file of more than `most_bytes` is not read. `memory` gives that for the cells.
    """

    def read(descriptor: int) -> KeptState:
        head = head_of(descriptor, path.stem)
        if head.num_bytes > most_bytes:
            raise Refused(Miss.UNREADABLE)
        place = head.head_bytes
        parts: dict[int, Buffer] = {}
        first, *others = head.parts
        cells = _read_part(descriptor, first, place, memory(first.num_bytes))  # at most what the file has
        place += first.num_bytes
        for part in others:
            parts[part.num_tokens] = _read_part(descriptor, part, place, new_memory(part.num_bytes))
            place += part.num_bytes
        return KeptState(head.seed, head.tokens, head.first_cut, cells, parts, head.scope)

    return guarded(path, read)


def _read_part(descriptor: int, part: Part, place: int, data: Buffer) -> Buffer:
    view, hashed, done = memoryview(data), xxh3_128(), 0
    while done < part.num_bytes:
        count = os.preadv(descriptor, [view[done : done + CHUNK_BYTES]], place + done)
        if not count:
            raise Refused(Miss.DAMAGED)  # it was cut meanwhile
        hashed.update(view[done : done + count])
        done += count
    if hashed.digest() != part.digest:
        raise Refused(Miss.DAMAGED)
    return data


def _scope_of(state: KeptState) -> bytes:
    return state.scope.encode("utf-8", "replace")[:MAX_SCOPE_BYTES]
