"""The logits that a decode call left, as numpy sees them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

# llama.h: llama_get_logits, with the plain address as its result
_logits_address = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(("llama_get_logits", lib._lib))
MOSTLY = 0.75  # of the rows: the maxima of all are found together when so many are asked for (docs/adr/009-sampling.md)


class Outputs:
    """The rows of the last decode call, in the order of the batch's tokens that want one. Engine thread only."""

    def __init__(self, context: Any, num_rows: int, n_vocab: int) -> None:
        """No decode call has more than `num_rows`."""
        self._context = context
        self._shape = num_rows, n_vocab
        self._addresses: dict[int, tuple[NDArray[np.float32], list[NDArray[np.float32]]]] = {}
        self._places: dict[int, int] = {}  # slot → its first row
        self._num_rows = 0
        self._matrix: NDArray[np.float32] = np.empty((0, n_vocab), np.float32)
        self._rows: list[NDArray[np.float32]] = []
        self._likeliest: list[int] | None = None  # of every row
        self._num_asked = 0  # rows whose likeliest token was asked for
        self._together = False

    def forget(self) -> None:
        """There are no rows until the next call of `expect`."""
        if self._places:
            self._together = self._num_asked >= MOSTLY * self._num_rows
        self._places, self._likeliest, self._num_asked = {}, None, 0

    def expect(self, slots: Sequence[tuple[int, int]]) -> None:
        """A decode call has left so many rows for each of these slots, in this order."""
        if not slots:
            return
        address = _logits_address(self._context)
        if address not in self._addresses:  # llama.cpp keeps its buffer, and a view takes as long as finding a maximum
            buffer = (ctypes.c_float * (self._shape[0] * self._shape[1])).from_address(address)
            matrix = np.ctypeslib.as_array(buffer).reshape(self._shape)
            self._addresses[address] = matrix, list(matrix)
        self._matrix, self._rows = self._addresses[address]
        self._num_rows = 0
        for slot, count in slots:
            self._places[slot] = self._num_rows
            self._num_rows += count

    def row(self, slot: int, row: int = 0) -> NDArray[np.float32]:
        """A row of the logits of a slot. Raises KeyError: llama.cpp has none for it."""
        return self._rows[self._places[slot] + row]

    def likeliest(self, slot: int, row: int = 0) -> int:
        """The token with the highest logit, before this row was changed. Raises KeyError.

        When most rows of the decode call before were asked for it, one call of numpy finds that of all.
        """
        row += self._places[slot]
        self._num_asked += 1
        if not self._together:
            return int(self._rows[row].argmax())
        if self._likeliest is None:
            self._likeliest = self._matrix[: self._num_rows].argmax(axis=1).tolist()
        return self._likeliest[row]
