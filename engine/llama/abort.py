"""Ends a running decode call from another thread, without the GIL."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp.llama_cpp as lib


class AbortFlag:
    """A byte that llama.cpp looks at between the nodes of its graph (CPU backends only).

    A callback in Python would take the GIL at every node. The C library's `strlen` reads the byte instead: of the
    empty string "" it makes 0, go on, of "\\1" it makes 1, abort.
    """

    def __init__(self, context: Any) -> None:
        self._text = ctypes.create_string_buffer(2)
        strlen = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p)
        callback = ctypes.cast(strlen, lib.ggml_abort_callback)
        self._keep = callback
        lib.llama_set_abort_callback(context, callback, ctypes.cast(self._text, ctypes.c_void_p))

    def raise_(self) -> None:
        """The decode call that runs now, or else the next one, is aborted. Any thread."""
        self._text[0] = b"\1"

    def is_raised(self) -> bool:
        return self._text[0] != b"\0"

    def lower(self) -> None:
        self._text[0] = b"\0"
