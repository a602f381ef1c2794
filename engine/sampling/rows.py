"""Share numpy's loops over the rows of a matrix among threads. numpy releases Python's lock in these loops."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

MIN_VALUES = 2**22  # per thread: with fewer, waking a thread takes longer than it saves (docs/adr/009-sampling.md)


class RowThreads:
    """Threads that read the rows of a matrix. Only the engine thread may use this object."""

    def __init__(self, max_threads: int, min_values: int = MIN_VALUES) -> None:
        """Create an object that uses up to `max_threads` threads, including the caller's thread.

        A thread is used only if it can read at least `min_values` values.
        """
        self.max_threads = max_threads
        self._min_values = min_values
        self._pool = ThreadPoolExecutor(max(1, max_threads - 1), "cellama-rows")  # starts threads when needed

    def run(self, read: Callable[[int, int], None], shape: tuple[int, int]) -> None:
        """Call `read(first, end)` for consecutive parts of the rows of a matrix with this shape.

        If the matrix is large enough for several threads, the calls run at the same time. If a call raises an
        exception, it is raised here after all calls have ended.
        """
        rows, width = shape
        num_parts = max(1, min(self.max_threads, rows, rows * width // self._min_values))
        bounds = [rows * part // num_parts for part in range(num_parts + 1)]
        others = [self._pool.submit(read, *bounds[part : part + 2]) for part in range(1, num_parts)]
        try:
            read(*bounds[:2])
        finally:
            wait(others)
        for other in others:
            other.result()

    def close(self) -> None:
        self._pool.shutdown()
