"""llama.cpp's log goes to Python's, and its last errors can be quoted."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections import deque
from collections.abc import Iterator

import llama_cpp.llama_cpp as lib

log = logging.getLogger("cellama.engine.llama")
_WARN, _ERROR = 3, 4  # ggml.h: ggml_log_level
_LEVELS = {_WARN: logging.DEBUG, _ERROR: logging.WARNING}  # what matters to us is raised, with its words
_last_errors: deque[str] = deque(maxlen=4)
_captured = threading.local()  # .lines: list[str], while this thread captures


@lib.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    message = text.decode(errors="replace").strip()
    if level == _ERROR and message:
        _last_errors.append(message)
    lines = getattr(_captured, "lines", None)
    if lines is not None:
        lines.append(message)
    if level in _LEVELS and message:
        log.log(_LEVELS[level], "%s", message)


def install() -> None:
    """Sends llama.cpp's log to the logger `cellama.engine.llama`."""
    lib.llama_log_set(_on_log, ctypes.c_void_p(0))


@contextlib.contextmanager
def capture() -> Iterator[list[str]]:
    """Collects every line that llama.cpp logs on this thread; other threads may load other models meanwhile."""
    outer = getattr(_captured, "lines", None)
    lines: list[str] = []
    _captured.lines = lines
    try:
        yield lines
    finally:
        _captured.lines = outer


def take_errors() -> str:
    """What llama.cpp complained of since the last call, in one line."""
    text = "; ".join(_last_errors)
    _last_errors.clear()
    return text
