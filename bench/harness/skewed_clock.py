"""Set a Python process's wall clock ahead by `CLOCK_AHEAD_S` seconds if the process starts with `environment_of`.

The module is copied as `sitecustomize.py` to a directory in PYTHONPATH, so it takes effect before other imports. The
module replaces `time.time`, `time_ns`, `clock_gettime` and `clock_gettime_ns` for CLOCK_REALTIME, and `now`, `utcnow`
and `today` of `datetime.datetime`. Times that C code reads are not affected (llama.cpp, file times, `localtime()`
without an argument).
"""

from __future__ import annotations

import datetime
import os
import shutil
import time
from pathlib import Path
from typing import Any

VARIABLE = "CLOCK_AHEAD_S"


def environment_of(ahead_s: float, folder: Path) -> dict[str, str]:
    """Return the environment variables for a process whose clock is ahead. This module is copied to `folder`."""
    folder.mkdir(exist_ok=True)
    shutil.copy(__file__, folder / "sitecustomize.py")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {VARIABLE: str(ahead_s), "PYTHONPATH": path}


def set_ahead(ahead_s: float) -> None:
    """Skew the clock of this process permanently."""
    ahead_ns = int(ahead_s * 1e9)
    real_ns, real_clock_ns, real_datetime = time.time_ns, time.clock_gettime_ns, datetime.datetime

    def clock_ns(clock: int) -> int:
        return real_clock_ns(clock) + (ahead_ns if clock == time.CLOCK_REALTIME else 0)

    class LooksReal(type):
        """Treat datetimes that C code creates as instances of the replacement class."""

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, real_datetime)

    class Datetime(real_datetime, metaclass=LooksReal):  # type: ignore[misc, valid-type]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls.fromtimestamp(time.time(), tz)

        @classmethod
        def utcnow(cls) -> Any:
            return cls.fromtimestamp(time.time(), datetime.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Any:
            return cls.now()

    time.time_ns = lambda: real_ns() + ahead_ns
    time.time = lambda: time.time_ns() / 1e9
    time.clock_gettime_ns = clock_ns
    time.clock_gettime = lambda clock: clock_ns(clock) / 1e9
    datetime.datetime = Datetime  # type: ignore[misc]


if __name__ == "sitecustomize":
    set_ahead(float(os.environ[VARIABLE]))
