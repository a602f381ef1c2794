"""Convert a slot's state between llama.cpp's format and a portable format. All functions are pure.

llama.cpp's format depends on the number of slots (state_seq_get_data in llama-context.cpp). llama.cpp's format consists
of a magic number, the slot, and one block per memory. A block of cells (state_write in llama-kv-cache.cpp) starts with
the number of streams. Each stream starts with its number of cells, followed by the cells. All cells of a slot are in
the same stream. The block of a recurrent memory is the last block and has no streams.

The portable format consists of `_HEAD`, the lengths of the stored streams of all cell blocks, reserved space, the
streams, and the recurrent block. The reserved space precedes the first stream. The reserved space is large enough for
everything that precedes this stream in llama.cpp's format. A state with at most one block of cells can therefore be
converted back in place.
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
_HEAD = struct.Struct("<III")  # tokens of the state, blocks of cells, 1 if there is no recurrent block
_MAX_STREAMS, _MAX_LAYERS, _MAX_ROW = 256, 1 << 12, 1 << 28
_RESERVED = 12 + 4 * (_MAX_STREAMS - 1)  # bytes for magic number, slot, number of streams, and empty streams
_CELL_EXTRAS = (0, 12)  # bytes per cell; some models store two more positions and the token (llama-kv-cells.h)


def to_portable(state: Bytes, num_tokens: int, num_cell_blocks: int | None) -> memoryview:
    """Return a state of `num_tokens` tokens in the portable format. Raises ValueError if its layout is unknown.

    `num_cell_blocks` is the number of blocks before the recurrent block, or None if the state has no recurrent block.
    """
    data = state.data
    if len(data) < 8 or _u32(data, 0) != MAGIC:
        raise ValueError("the state has no magic number")
    streams, end = next(_whole(data, num_cell_blocks), (None, 0))
    if streams is None:
        raise ValueError("the state has an unknown layout")
    head = _HEAD.pack(num_tokens, len(streams), num_cell_blocks is None)
    lengths = struct.pack(f"<{len(streams)}Q", *(last - first for first, last in streams))
    return _joined([head, lengths, bytes(_RESERVED), *(data[first:last] for first, last in streams), data[end:]]).data


def from_portable(portable: Buffer, num_streams: int, num_cell_blocks: int | None) -> tuple[Bytes, int]:
    """Convert a portable state to llama.cpp's format with `num_streams` streams.

    Return the converted state and its number of tokens. Raises ValueError if the state is damaged.

    If possible, a writable buffer is converted in place, so the state isn't copied.
    """
    data = memoryview(portable).cast("B")
    try:
        num_tokens, num_blocks, is_cells_only = _HEAD.unpack_from(data)
        lengths = struct.unpack_from(f"<{num_blocks}Q", data, _HEAD.size)
    except struct.error as error:
        raise ValueError(f"the state is too short: {error}") from None
    if bool(is_cells_only) != (num_cell_blocks is None) or num_cell_blocks not in (None, num_blocks):
        raise ValueError(f"the state has {num_blocks} blocks of cells; this model's states have a different layout")
    start = _HEAD.size + 8 * num_blocks + _RESERVED
    end = start + sum(lengths)
    if end > len(data) or (is_cells_only and end != len(data)):
        raise ValueError("the lengths in the state's header don't match its size")
    # llama.cpp reads the cells into the slot's own stream, whichever stream of the state has them.
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
    """Return the concatenated parts.

    Unlike `bytes.join`, this function releases the GIL, so the engine thread can continue.
    """
    return np.concatenate([np.frombuffer(part, np.uint8) for part in parts if len(part)])


_Streams = list[tuple[int, int]]  # start and end of the cells of each block; equal if the block has no cells


def _whole(data: memoryview, num_blocks: int | None) -> Iterator[tuple[_Streams, int]]:
    """Yield each layout that fits the whole state, with the start offset of the recurrent block."""
    for extra in _CELL_EXTRAS:
        for streams, end in _blocks(data, 8, num_blocks, extra):
            if (num_blocks is None) == (end == len(data)):
                yield streams, end


def _blocks(data: memoryview, at: int, num_blocks: int | None, extra: int) -> Iterator[tuple[_Streams, int]]:
    if num_blocks == 0 or (num_blocks is None and at == len(data)):
        yield [], at
        return
    try:
        ends = list(_block(data, at, extra))
    except (ValueError, struct.error):
        return
    for streams, end in ends:
        for others, last in _blocks(data, end, None if num_blocks is None else num_blocks - 1, extra):
            yield [streams, *others], last


def _block(data: memoryview, at: int, extra: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield the possible ranges of a block's cells, each with the end offset of the block."""
    num_streams = _u32(data, at)
    if not 1 <= num_streams <= _MAX_STREAMS:
        return
    at += 4
    for stream in range(num_streams):
        if _u32(data, at):
            num_rest_bytes = 4 * (num_streams - stream - 1)
            for end in _cells(data, at, extra):
                if data[end : end + num_rest_bytes] == bytes(num_rest_bytes):
                    yield (at, end), end + num_rest_bytes
            return
        at += 4
    yield (at, at), at


def _cells(data: memoryview, at: int, extra: int) -> Iterator[int]:
    """Yield the possible end offsets of the cells that start at offset `at`.

    The cells contain keys and values, or only keys.
    """
    count, size = _u32(data, at), 12 + extra
    at += 4
    if len(data) < at + count * size:
        return
    rows = np.frombuffer(data[at : at + count * size], np.uint8).reshape(count, size)
    if (rows[:, 4:8].copy().view("<u4") != 1).any():  # the number of slots that share a cell
        return
    at += count * size
    transposed, num_layers = _u32(data, at), _u32(data, at + 4)
    if transposed > 1 or num_layers > _MAX_LAYERS:
        return
    end_of_keys = _rows(data, at + 8, num_layers, count)
    if num_layers:
        with_values = _columns if transposed else _rows
        with contextlib.suppress(ValueError, struct.error):
            yield with_values(data, end_of_keys, num_layers, count)
    yield end_of_keys


def _rows(data: memoryview, at: int, num_layers: int, count: int) -> int:
    """Return the end offset of `num_layers` layers. A layer consists of a type, a row length, and one row per cell."""
    for _ in range(num_layers):
        _, row = struct.unpack_from("<iQ", data, at)
        at = _skip(data, at + 12, row, count)
    return at


def _columns(data: memoryview, at: int, num_layers: int, count: int) -> int:
    """Return the end offset of `num_layers` layers with transposed values.

    Each layer consists of a type, an element size, a number of elements, and the values.
    """
    for _ in range(num_layers):
        _, size, width = struct.unpack_from("<iII", data, at)
        at = _skip(data, at + 12, size * width, count)
    return at


def _skip(data: memoryview, at: int, row: int, count: int) -> int:
    if not 0 < row <= _MAX_ROW or at + row * count > len(data):
        raise ValueError("the rows have an unknown length")
    return at + row * count


def _u32(data: memoryview, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])
