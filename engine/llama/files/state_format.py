"""A slot's state as llama.cpp writes it, and the same without what depends on the number of slots. Pure, any thread.

llama-context.cpp, state_seq_get_data: a magic number, the slot, then a block per memory. llama-kv-cache.cpp,
state_write: a block of cells begins with the number of streams, each with its number of cells and, if there are any,
those; a slot has cells in one stream only. The block of a recurrent memory, which is the last one, has no streams.

Ours: `_HEAD`, the lengths of the streams that are kept of each block of cells, room for what llama.cpp wants before
the first one, these, and the recurrent block. Where there is one block of cells at most, nothing is moved to have
llama.cpp's form again.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

Bytes = NDArray[np.uint8]

MAGIC = 0xAF143CD8
_HEAD = struct.Struct("<III")  # tokens that the state holds, blocks of cells, 1 if there is no other one
_MAX_STREAMS, _MAX_LAYERS, _MAX_ROW = 256, 1 << 12, 1 << 28
_ROOM = 12 + 4 * (_MAX_STREAMS - 1)  # bytes: a magic number, the slot, the number of streams, empty ones
_CELL_EXTRAS = (0, 12)  # bytes: some models note two more positions and the token (llama-kv-cells.h)


def to_portable(state: Bytes, num_tokens: int, num_cell_blocks: int | None) -> memoryview:
    """The state of a slot that holds so many tokens; ValueError for what is not laid out as it is known here.

    `num_cell_blocks` come before a recurrent block; None: there is none, and all are blocks of cells.
    """
    data = state.data
    if len(data) < 8 or _u32(data, 0) != MAGIC:
        raise ValueError("it does not begin as a state")
    streams, end = next(_whole(data, num_cell_blocks), (None, 0))
    if streams is None:
        raise ValueError("its blocks are not of a known form")
    head = _HEAD.pack(num_tokens, len(streams), num_cell_blocks is None)
    lengths = struct.pack(f"<{len(streams)}Q", *(last - first for first, last in streams))
    return _joined([head, lengths, bytes(_ROOM), *(data[first:last] for first, last in streams), data[end:]]).data


def from_portable(portable: Buffer, num_streams: int, num_cell_blocks: int | None) -> tuple[Bytes, int]:
    """What llama.cpp reads where cells lie in so many streams, and how many tokens it holds; ValueError if damaged.

    What may be written to is taken over where that saves a copy.
    """
    data = memoryview(portable).cast("B")
    try:
        num_tokens, num_blocks, is_cells_only = _HEAD.unpack_from(data)
        lengths = struct.unpack_from(f"<{num_blocks}Q", data, _HEAD.size)
    except struct.error as error:
        raise ValueError(f"it is too short: {error}") from None
    if bool(is_cells_only) != (num_cell_blocks is None) or num_cell_blocks not in (None, num_blocks):
        raise ValueError(f"it has {num_blocks} blocks of cells, and this model's states have others")
    start = _HEAD.size + 8 * num_blocks + _ROOM
    end = start + sum(lengths)
    if end > len(data) or (is_cells_only and end != len(data)):
        raise ValueError("its lengths are not those of its parts")
    # Whichever stream has the cells: llama.cpp reads them into the slot's own.
    before = [struct.pack("<I", num_streams) + bytes(4 * (num_streams - bool(length))) for length in lengths]
    first = struct.pack("<II", MAGIC, 0) + b"".join(before[:1])
    if num_blocks <= 1 and not data.readonly and len(first) <= start:
        data[start - len(first) : start] = first
        return np.frombuffer(data[start - len(first) :], np.uint8), num_tokens
    parts: list[bytes | memoryview] = [first]
    at = start
    for number, length in enumerate(lengths):
        parts += [before[number] if number else b"", data[at : at + length]]
        at += length
    return _joined([*parts, data[at:]]), num_tokens


def _joined(parts: Sequence[bytes | memoryview]) -> Bytes:
    """All in one, as `bytes.join`, which would keep Python's global lock: the engine thread goes on meanwhile."""
    return np.concatenate([np.frombuffer(part, np.uint8) for part in parts if len(part)])


_Streams = list[tuple[int, int]]  # where the cells of each block lie; nowhere if it has none


def _whole(data: memoryview, num_blocks: int | None) -> Iterator[tuple[_Streams, int]]:
    """Ways to read it all, of which one fits at most, and where the recurrent block begins."""
    for extra in _CELL_EXTRAS:
        for streams, end in _blocks(data, 8, num_blocks, extra):
            if (num_blocks is None) == (end == len(data)):
                yield streams, end


def _blocks(data: memoryview, at: int, left: int | None, extra: int) -> Iterator[tuple[_Streams, int]]:
    if left == 0 or (left is None and at == len(data)):
        yield [], at
        return
    try:
        ends = list(_block(data, at, extra))
    except (ValueError, struct.error):
        return
    for streams, end in ends:
        for others, last in _blocks(data, end, None if left is None else left - 1, extra):
            yield [streams, *others], last


def _block(data: memoryview, at: int, extra: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Where the cells of a block can lie, and where it ends then."""
    num_streams = _u32(data, at)
    if not 1 <= num_streams <= _MAX_STREAMS:
        return
    at += 4
    for stream in range(num_streams):
        if _u32(data, at):
            behind = 4 * (num_streams - stream - 1)
            for end in _cells(data, at, extra):
                if data[end : end + behind] == bytes(behind):
                    yield (at, end), end + behind
            return
        at += 4
    yield (at, at), at


def _cells(data: memoryview, at: int, extra: int) -> Iterator[int]:
    """Where cells that begin here can end: behind keys and values, or keys alone."""
    count, size = _u32(data, at), 12 + extra
    at += 4
    if len(data) < at + count * size:
        return
    rows = np.frombuffer(data[at : at + count * size], np.uint8).reshape(count, size)
    if (rows[:, 4:8].copy().view("<u4") != 1).any():  # of how many slots each is
        return
    at += count * size
    transposed, num_layers = _u32(data, at), _u32(data, at + 4)
    if transposed > 1 or num_layers > _MAX_LAYERS:
        return
    behind_keys = _rows(data, at + 8, num_layers, count)
    if num_layers:
        with_values = _columns if transposed else _rows
        with contextlib.suppress(ValueError, struct.error):
            yield with_values(data, behind_keys, num_layers, count)
    yield behind_keys


def _rows(data: memoryview, at: int, num_layers: int, count: int) -> int:
    """The end of so many layers: a type, the length of a row, a row per cell."""
    for _ in range(num_layers):
        _, row = struct.unpack_from("<iQ", data, at)
        at = _skip(data, at + 12, row, count)
    return at


def _columns(data: memoryview, at: int, num_layers: int, count: int) -> int:
    """The same of transposed values: a type, the size of an element, their number per cell."""
    for _ in range(num_layers):
        _, size, width = struct.unpack_from("<iII", data, at)
        at = _skip(data, at + 12, size * width, count)
    return at


def _skip(data: memoryview, at: int, row: int, count: int) -> int:
    if not 0 < row <= _MAX_ROW or at + row * count > len(data):
        raise ValueError("rows of no known length")
    return at + row * count


def _u32(data: memoryview, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])
