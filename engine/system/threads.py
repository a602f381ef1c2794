"""Threads with room for llama.cpp's recursive code."""

from __future__ import annotations

import threading
from collections.abc import Callable

# Regular expressions of a vocabulary and parsers of grammars recurse with the length of a text; what overflows the
# stack ends the process. Memory that is not used costs nothing but addresses.
STACK_BYTES = 64 << 20

_changing = threading.Lock()


def start_deep(run: Callable[[], None], name: str) -> threading.Thread:
    """A daemon thread with a stack of STACK_BYTES, started; other threads of the process get what they got before."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    with _changing:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread
