"""The watchdog ends a process whose threads hang or fail, and no other process."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
import time

import pytest

from cellama.engine.system.threads import STACK_BYTES, start_deep
from cellama.engine.system.watchdog import EXIT_STALLED, FIRST_S, MANY, PAGING, Pulse, Watchdog

from ....conftest import wait_until

HANG_S = 10.0


class World:
    """A simulated clock, a watchdog that checks every second, and a pulse."""

    def __init__(self) -> None:
        self.now = 100.0
        self.paged = 0
        self.ended: list[str] = []
        self.pulse = Pulse("engine", lambda: self.now)
        self.watchdog = Watchdog(HANG_S, self.ended.append, lambda: self.paged)
        self.watchdog.watch(self.pulse)
        self.watchdog.look(self.now)

    def passes(self, seconds: float, paged_per_s: int = 0) -> None:
        for _ in range(round(seconds)):
            self.now += 1
            self.paged += paged_per_s
            self.watchdog.look(self.now)

    def step(self, kind: str, seconds: float, size: int = 1) -> None:
        self.pulse.beat(kind, size=size)
        self.now += seconds
        self.pulse.rest()


@pytest.fixture
def world() -> World:
    return World()


def test_hanging_thread_is_reported_with_its_step_and_its_requests(world: World) -> None:
    world.pulse.beat("sample", ("job-1#2",))
    world.passes(HANG_S)
    assert world.ended == []
    world.passes(3)
    assert "thread 'engine' has been in one step (sample) for" in world.ended[0]
    assert "working for: job-1#2" in world.ended[0]


def test_suspect_is_the_request_that_the_step_was_processing(world: World) -> None:
    world.pulse.beat("sample", ("a", "b", "c"))
    world.pulse.suspect = "b"
    world.passes(HANG_S + 3)
    assert world.ended[0].endswith("working for: b")
    other = World()
    other.pulse.suspect = "x"  # suspect of the previous step
    other.pulse.beat("sample", ("a", "b"))
    other.passes(HANG_S + 3)
    assert other.ended[0].endswith("working for: a, b")


def test_idle_or_progressing_thread_is_not_reported(world: World) -> None:
    for _ in range(5):
        world.pulse.rest()
        world.passes(1000)
        for _ in range(100):
            world.pulse.beat("sample")
            world.passes(5)
    assert world.ended == []


@pytest.mark.parametrize(
    ("seen", "size", "expected_s"),
    [
        ({1: 0.5}, 1, 0.5),
        ({1: 0.5, 500: 2.0}, 1, 0.5),
        ({1: 0.5, 500: 2.0}, 400, 2.0),
        ({1: 0.5, 500: 2.0}, 10, 2.0),  # the next larger one
        ({1: 0.5}, 10, 0.5 * 16),  # none is larger
    ],
)
def test_step_may_take_many_times_as_long_as_earlier_steps_of_its_size(
    world: World, seen: dict[int, float], size: int, expected_s: float
) -> None:
    for each, seconds in seen.items():
        world.step("decode", seconds, each)
    world.pulse.beat("decode", size=size)
    world.passes(MANY * expected_s)
    assert world.ended == []
    world.passes(3)
    assert world.ended


def test_only_the_first_step_of_a_kind_may_take_longer(world: World) -> None:
    world.pulse.beat("decode", size=512, first_s=FIRST_S)
    world.passes(FIRST_S)
    assert world.ended == []
    world.pulse.beat("decode", size=512, first_s=FIRST_S)
    world.passes(FIRST_S + 3)  # independent of the previous duration
    assert world.ended


def test_time_limit_decreases_again_after_a_slow_step(world: World) -> None:
    world.step("decode", 500.0)
    for _ in range(10_000):
        world.step("decode", 0.1)
    world.pulse.beat("decode")
    world.passes(HANG_S + 3)
    assert world.ended


def test_time_during_which_the_process_is_suspended_does_not_count(world: World) -> None:
    world.pulse.beat("sample")
    world.passes(2)
    world.now += 3600
    world.watchdog.look(world.now)
    world.passes(5)
    assert world.ended == []


def test_thread_that_waits_for_pages_from_disk_is_not_reported(world: World) -> None:
    world.pulse.beat("sample")
    world.passes(100, paged_per_s=PAGING)
    assert world.ended == []
    world.passes(HANG_S + 3)
    assert world.ended


def test_failed_thread_is_reported_immediately_while_it_is_watched(world: World) -> None:
    world.pulse.die("KeyError('x')")
    assert world.ended == ["thread 'engine' failed: KeyError('x')"]
    other = World()
    assert other.pulse.is_watched
    other.watchdog.close()
    assert not other.pulse.is_watched
    other.pulse.die("KeyError('x')")
    assert other.ended == []


HANGING = """
import logging, sys, threading
from cellama.engine import Engine, EngineOptions, Request, Watchdog
from cellama.engine.fake import FakeBackend
import cellama.engine.system.watchdog as watchdog

class Backend(FakeBackend):
    def decode(self, *call):
        if len(self.batches) == 3:
            what_hangs()
        super().decode(*call)

def what_hangs():
    {hang}

logging.basicConfig(format="%(message)s")
watchdog.LOOK_S = 0.02
dog = Watchdog(0.2)
engine = Engine(Backend(), EngineOptions(n_parallel=4, n_batch=64), "tiny")
dog.watch(engine.pulse)
dog.start()
engine.submit(Request("the-job#1", (1, 2, 3))).result(60)
"""


@pytest.mark.parametrize(
    ("hang", "told"),
    [
        ("threading.Event().wait()", "has been in one step (decode) for"),
        ("logging._lock.acquire(); threading.Event().wait()", "Timeout"),
        ("raise SystemExit", "failed: "),
    ],
)
def test_process_exits_with_a_special_code_and_logs_where_it_hangs(hang: str, told: str) -> None:
    script = HANGING.replace("{hang}", hang)
    if told == "Timeout":  # the others are logged, however long that takes
        script = script.replace("watchdog.LOOK_S", "watchdog.REPORT_S = 0.5\nwatchdog.LOOK_S")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert told in done.stderr
    assert "what_hangs" in done.stderr
    assert done.returncode == (EXIT_STALLED if "Timeout" not in told else 1), done.stderr
    if "decode" in told:
        assert "working for: the-job#1" in done.stderr


KEEPS_GIL = "import ctypes; ctypes.PyDLL(None).sleep(600)"  # PyDLL, unlike CDLL, keeps the GIL during the call


def test_process_exits_when_a_thread_never_releases_the_gil() -> None:
    script = HANGING.replace("{hang}", KEEPS_GIL).replace(
        "watchdog.LOOK_S", "watchdog.LAST_RESORT_S = 3\nwatchdog.LOOK_S"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert "Timeout (0:00:03)!" in done.stderr
    assert "what_hangs" in done.stderr


SUSPENDED = """
import sys, time
from cellama.engine import Watchdog
import cellama.engine.system.watchdog as watchdog

watchdog.LOOK_S, watchdog.LAST_RESORT_S = 0.02, 2
dog = Watchdog(0.2)
dog.start()
until = time.monotonic() + 2 * watchdog.LAST_RESORT_S
while time.monotonic() < until:  # longer than the last resort, which each look puts off
    time.sleep(0.1)
print("looked", flush=True)
sys.stdin.readline()
"""


def test_process_exits_when_it_was_suspended_for_longer_than_the_last_resort_timeout() -> None:
    argv = [sys.executable, "-c", SUSPENDED]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"looked\n"
        process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 3
        wait_until(lambda: time.monotonic() > until, "the last resort")
        process.send_signal(signal.SIGCONT)
        errors = process.stderr.read() if process.stderr else b""
        code = process.wait(60)
    # faulthandler reads the stacks without the GIL. A thread that runs at the same time can make it crash, which also
    # ends the process.
    assert code in (1, -signal.SIGSEGV), errors
    assert b"Timeout (0:00:02)!" in errors


@pytest.mark.skipif(sys.platform != "linux", reason="pthread_getattr_np is the GNU C library's")
def test_only_threads_with_recursive_code_have_deep_stacks() -> None:
    sizes: list[int] = []

    def note() -> None:
        libc, attributes, size = ctypes.CDLL(None), ctypes.create_string_buffer(256), ctypes.c_size_t()
        libc.pthread_self.restype = ctypes.c_void_p
        libc.pthread_getattr_np(ctypes.c_void_p(libc.pthread_self()), attributes)
        libc.pthread_attr_getstacksize(attributes, ctypes.byref(size))
        sizes.append(size.value)

    for start in (lambda: start_deep(note, "deep"), lambda: threading.Thread(target=note)):
        thread = start()
        if not thread.ident:
            thread.start()
        thread.join(30)
    assert sizes[0] >= STACK_BYTES
    assert sizes[1] < STACK_BYTES
