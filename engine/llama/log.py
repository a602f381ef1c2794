"""Forward llama.cpp's log to Python's logging, and quote the latest llama.cpp errors in exceptions."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator

import llama_cpp.llama_cpp as lib

from cellama.config.logging import event_logger

log = event_logger("cellama.engine.llama")
_WARN, _ERROR = 3, 4  # ggml.h: ggml_log_level
# llama.cpp's levels are lowered, because errors that matter are raised as exceptions that quote its messages.
_LEVELS = {_WARN: logging.DEBUG, _ERROR: logging.WARNING}
MAX_ERRORS = 4  # messages of llama.cpp that an exception quotes; the last ones name the cause


class _ThreadLog(threading.local):
    """The log messages of one thread.

    llama.cpp logs on the calling thread, and several threads can load models at the same time.
    """

    def __init__(self) -> None:
        self.errors: deque[str] = deque(maxlen=MAX_ERRORS)
        self.lines: list[str] | None = None  # set within `capture`
        self.is_aborting: Callable[[], bool] | None = None  # set within `call_abortable`
        self.held: list[str] = []  # errors since the abort, held until the result of the call shows their cause


_thread_log = _ThreadLog()


@lib.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    message = text.decode(errors="replace").strip()
    if level == _ERROR and message:
        _thread_log.errors.append(message)
    if _thread_log.lines is not None:
        _thread_log.lines.append(message)
    if level == _ERROR and message and _thread_log.is_aborting is not None and _thread_log.is_aborting():
        _thread_log.held.append(message)
    elif level in _LEVELS and message:
        log.log(_LEVELS[level], "llama.cpp", detail=message)


def install() -> None:
    """Forward llama.cpp's log to the logger `cellama.engine.llama`."""
    lib.llama_log_set(_on_log, ctypes.c_void_p(0))


@contextlib.contextmanager
def capture() -> Iterator[list[str]]:
    """Collect all lines that llama.cpp logs on this thread within the `with` block.

    Nested blocks also pass their lines to the outer block. Ctrl-C takes effect at the end of the block.
    """
    outer, lines = _thread_log.lines, list[str]()
    _thread_log.lines = lines
    try:
        with _interrupts_deferred():
            yield lines
    finally:
        _thread_log.lines = outer
        if outer is not None:
            outer += lines


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Delay the KeyboardInterrupt raised by Ctrl-C until the end of the `with` block.

    While llama.cpp is running, the first Python code that runs after the signal is `_on_log`. Python prints and ignores
    exceptions in this callback, so the interrupt would be lost.
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
    """Run a llama.cpp call that another thread may abort, and return its return code.

    llama.cpp logs an abort as an error. Messages logged after an abort are therefore held until the call returns. If
    the return code is `aborted`, the held messages are logged as debug messages, and otherwise as warnings.
    """
    _thread_log.is_aborting, level = is_aborting, logging.WARNING
    try:
        code = call()
        level = logging.DEBUG if code == aborted else logging.WARNING
        return code
    finally:
        held, _thread_log.held, _thread_log.is_aborting = _thread_log.held, [], None
        for message in held:
            log.log(level, "llama.cpp", detail=message)


def take_errors() -> str:
    """Return the latest errors that llama.cpp logged on this thread, joined into one line, and clear them."""
    text = "; ".join(_thread_log.errors)
    _thread_log.errors.clear()
    return text
