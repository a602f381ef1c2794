"""llama.cpp's log goes to Python's, and its last errors can be quoted."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator

import llama_cpp.llama_cpp as lib

log = logging.getLogger("cellama.engine.llama")
_WARN, _ERROR = 3, 4  # ggml.h: ggml_log_level
_LEVELS = {_WARN: logging.DEBUG, _ERROR: logging.WARNING}  # what matters to us is raised, with its words
MAX_ERRORS = 4  # lines of llama.cpp that an error quotes: the last ones name the cause


class _OfThread(threading.local):
    """What one thread has heard: llama.cpp logs on the thread that calls it, and several load models side by side."""

    def __init__(self) -> None:
        self.errors: deque[str] = deque(maxlen=MAX_ERRORS)
        self.lines: list[str] | None = None  # while the thread captures
        self.is_aborting: Callable[[], bool] | None = None  # while it runs a call that may be aborted on purpose
        self.held: list[str] = []  # errors logged since the abort, until the call's result shows its cause


_heard = _OfThread()


@lib.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    message = text.decode(errors="replace").strip()
    if level == _ERROR and message:
        _heard.errors.append(message)
    if _heard.lines is not None:
        _heard.lines.append(message)
    if level == _ERROR and message and _heard.is_aborting is not None and _heard.is_aborting():
        _heard.held.append(message)
    elif level in _LEVELS and message:
        log.log(_LEVELS[level], "%s", message)


def install() -> None:
    """Sends llama.cpp's log to the logger `cellama.engine.llama`."""
    lib.llama_log_set(_on_log, ctypes.c_void_p(0))


@contextlib.contextmanager
def capture() -> Iterator[list[str]]:
    """Collects every line that llama.cpp logs on this thread; other threads may load other models meanwhile.

    What is collected within another one is that one's, too. Ctrl-C takes effect at the end of the block.
    """
    outer, lines = _heard.lines, list[str]()
    _heard.lines = lines
    try:
        with _interrupts_deferred():
            yield lines
    finally:
        _heard.lines = outer
        if outer is not None:
            outer += lines


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Raise KeyboardInterrupt for a Ctrl-C only after the block.

    While llama.cpp runs, the first Python code that sees the signal is `_on_log`. Python prints and drops exceptions of
    such a callback, so the interrupt would be lost.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupts:
            raise KeyboardInterrupt


def call_abortable(is_aborting: Callable[[], bool], call: Callable[[], int], aborted: int) -> int:
    """Run a call that another thread may abort, and return its code.

    llama.cpp logs an abort like a fault of its own. What it logs after the abort waits for the code: `aborted` makes
    it debug output, any other code the warnings that it would have been.
    """
    _heard.is_aborting, level = is_aborting, logging.WARNING
    try:
        code = call()
        level = logging.DEBUG if code == aborted else logging.WARNING
        return code
    finally:
        held, _heard.held, _heard.is_aborting = _heard.held, [], None
        for message in held:
            log.log(level, "%s", message)


def take_errors() -> str:
    """What llama.cpp complained of on this thread since its last call, in one line."""
    text = "; ".join(_heard.errors)
    _heard.errors.clear()
    return text
