"""`cellama doctor`: check this machine and its Redis, and print each finding with its remedy.

A check never raises and never hangs: each check runs in its own thread, and an error or a missed deadline becomes
a finding. No finding contains a password.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import importlib.metadata
import importlib.util
import json as json_module
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import typer
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from rich.markup import escape
from rich.table import Table

from cellama.api.machine.redis_server import LOOPBACK, PortTaken, check_port_free
from cellama.config import Settings, SettingsError
from cellama.tasks.connection.connections import connect, redis_time
from cellama.tasks.connection.kombu_internals import PRODUCER_PARTS, READER_PARTS, UnfitLibraries, require_parts
from cellama.tasks.connection.redis_errors import CLUSTER, probe_writes, problems_of, reaching_redis
from cellama.tasks.contract.codes import Exit
from cellama.tasks.contract.errors import JobError
from cellama.tasks.state.registry import WorkerEntry, cellama_version, live_workers

from .options import JsonOption
from .output import out, plural, print_json, printable, readable
from .services import FLOWER_PORT, GATEWAY_PORT, METRICS_PORT, WORKER_MODULES, RedisOption, apply

Level = Literal["ok", "warning", "error"]

CHECK_TIMEOUT_S = 30.0  # for all checks together; the slowest one starts llama.cpp, which also starts the GPU's driver
BUILD_TIMEOUT_S = 20.0  # less than CHECK_TIMEOUT_S, so that the finding can name the cause
REDIS_TIMEOUT_S = 3.0  # for the connection and for each reply
HTTP_TIMEOUT_S = 1.0  # for a program on this machine
MAX_CLOCK_DIFFERENCE_S = 1.0  # more than half the round trip of a slow network, which limits the accuracy
MIN_FREE_BYTES = 1 << 30  # room for logs, the append-only file and the files of the gateway
NEARLY_FULL = 0.9  # fraction of maxmemory
MAX_NAMES = 3  # workers that a finding names per version
MIN_REDIS = (6, 2)  # the first version with the command COPY
NEWEST_TESTED_PYTHON = (3, 13)  # as in docs/compatibility.md
COMPILERS = ("c++", "g++", "clang++")

# Names of features in llama.cpp's system info, with their names in /proc/cpuinfo (x86, then ARM). AMX is not listed,
# because cellama disables it.
CPU_FLAGS = {
    "SSE3": "pni",
    "SSSE3": "ssse3",
    "AVX": "avx",
    "AVX2": "avx2",
    "F16C": "f16c",
    "FMA": "fma",
    "BMI2": "bmi2",
    "AVX_VNNI": "avx_vnni",
    "AVX512": "avx512f",
    "AVX512_VBMI": "avx512vbmi",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "NEON": "asimd",
    "DOTPROD": "asimddp",
    "MATMUL_INT8": "i8mm",
    "SVE": "sve",
}
CPU_INFO = Path("/proc/cpuinfo")
PCI_DEVICES = Path("/sys/bus/pci/devices")
DISPLAY_CLASS = "0x03"  # first byte of the PCI class of display controllers
# PCI ids of vendors. Intel is not listed, because most of its GPUs are part of the CPU and hardly faster.
GPU_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
GPU_OPTIONS = {"NVIDIA": "-DGGML_CUDA=on", "AMD": "-DGGML_VULKAN=on", "Apple": "-DGGML_METAL=on"}
REDIS_REMEDIES = {
    "maxmemory-policy": (
        "on the Redis server, run `redis-cli CONFIG SET maxmemory-policy noeviction`, and set it in redis.conf"
    ),
    "appendonly": "on the Redis server, run `redis-cli CONFIG SET appendonly yes`, and set it in redis.conf",
}
_MARKS: dict[Level, str] = {"ok": "[green]✔[/]", "warning": "[bold yellow]![/]", "error": "[bold red]✘[/]"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: the finding, and a remedy unless `level` is ok."""

    level: Level
    name: str
    found: str
    remedy: str = ""


Check = Callable[[], Iterable[Finding]]


def doctor_command(redis: RedisOption = None, json: JsonOption = False) -> None:
    """Check the installation, this machine and Redis, and print each problem with its remedy.

    The command doesn't change anything. The exit code is 1 if there is an error, and 0 if there are only warnings.

    Example:  cellama doctor
    """
    findings = run_checks(_checks(redis))
    has_error = any(finding.level == "error" for finding in findings)
    if json:
        print_json({"cellama": cellama_version(), "ok": not has_error, "findings": list(map(asdict, findings))})
    else:
        print_findings(findings)
    if has_error:
        raise typer.Exit(Exit.FAILED)


def _checks(redis: str | None) -> dict[str, Check]:
    """Return all checks keyed by name, in output order.

    If the settings are invalid, return only the checks that don't need settings.
    """
    checks: dict[str, Check] = {"Python": check_python, "packages": check_packages, "llama.cpp": check_llama_cpp}
    try:
        settings = apply(None, redis)
    except SettingsError as error:
        found = Finding("error", "settings", str(error), "correct them; then Redis, disk and ports are also checked")
        return {**checks, "settings": lambda: [found]}
    return {
        **checks,
        "Redis": functools.partial(check_redis, settings),
        "disk": functools.partial(check_disk, settings),
        "ports": functools.partial(check_ports, settings),
    }


def run_checks(checks: dict[str, Check], timeout_s: float = CHECK_TIMEOUT_S) -> list[Finding]:
    """Run all checks concurrently, and return their findings in order. A failed check becomes a finding."""
    results: dict[str, queue.SimpleQueue[list[Finding]]] = {name: queue.SimpleQueue() for name in checks}
    for name, check in checks.items():
        # Daemon threads, because a check that hangs, for example in a name lookup, must not keep the process alive.
        threading.Thread(target=lambda n=name, c=check: results[n].put(_result_of(n, c)), daemon=True).start()
    deadline = time.monotonic() + timeout_s
    findings: list[Finding] = []
    for name, result in results.items():
        try:
            findings += result.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            remedy = "a disk, the name service or a driver hangs; repair it, and run this command again"
            findings.append(Finding("error", name, f"no result after {timeout_s:g} s", remedy))
    return findings


def _result_of(name: str, check: Check) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:  # the boundary of the thread
        found = f"the check failed: {type(error).__name__}: {error}"
        return [Finding("error", name, found, "report this as a bug in cellama")]


def print_findings(findings: list[Finding]) -> None:
    """Print one row per finding, with the remedy below it, and a summary."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for finding in findings:
        grid.add_row(_MARKS[finding.level], finding.name, escape(printable(finding.found)))
        if finding.remedy:
            remedy = Table.grid(padding=(0, 1, 0, 0))
            remedy.add_row("[dim]→[/]", escape(printable(finding.remedy)))
            grid.add_row("", "", remedy)
    out.print(grid)
    counts = [(sum(each.level == level for each in findings), level) for level in ("error", "warning")]
    problems = ", ".join(plural(count, level) for count, level in counts if count)
    out.print(f"\n{problems or 'no problems'}", style="bold" if problems else "bold green")


# Python and packages


def check_python() -> Iterable[Finding]:
    """Yield a finding about the Python version."""
    version = platform.python_version()
    found = f"{version} on {platform.system()} {platform.machine()}, cellama {cellama_version()}"
    if sys.version_info[:2] > NEWEST_TESTED_PYTHON:
        newest = ".".join(map(str, NEWEST_TESTED_PYTHON))
        yield Finding("warning", "Python", f"{found}: cellama is not tested with it", f"use Python 3.11 to {newest}")
    else:
        yield Finding("ok", "Python", found)


def check_packages() -> Iterable[Finding]:
    """Check whether cellama supports the installed Celery, kombu and redis-py.

    Workers support fewer versions than clients.
    """
    names = {"Celery": "celery", "kombu": "kombu", "redis-py": "redis"}
    found = ", ".join(f"{name} {importlib.metadata.version(package)}" for name, package in names.items())
    try:
        require_parts(
            *((*PRODUCER_PARTS, *READER_PARTS) if _missing_modules() else ())
        )  # by default, the parts that workers need
    except (UnfitLibraries, ImportError) as error:
        problem, _, remedy = str(error).partition("; ")
        yield Finding("error", "packages", problem, remedy)
    else:
        yield Finding("ok", "packages", found)


# llama.cpp, CPU and GPU


def check_llama_cpp() -> Iterable[Finding]:
    """Yield findings about the llama.cpp build, and about CPU features and GPUs that the build can't use."""
    if missing := _missing_modules():
        yield _not_installed(missing)
        return
    build = read_build()
    if isinstance(build, Finding):
        yield build
        return
    accelerators = ", ".join(build["gpus"]) or ("GPU build" if build["supports_gpu"] else "CPU build")
    yield Finding("ok", "llama.cpp", f"llama-cpp-python {build['version']}, {accelerators}")
    yield from cpu_findings(build["features"], cpu_flags(), build["cpu_variant"])
    yield from gpu_findings(build, seen_gpus())


def _missing_modules() -> list[str]:
    """Return the modules that a worker needs but that are not installed."""
    return [name for name in WORKER_MODULES if importlib.util.find_spec(name) is None]


def _not_installed(missing: list[str]) -> Finding:
    found = f"not installed ({', '.join(missing)}), so this machine can send jobs, but can't run a worker"
    remedy = "for a worker: pip install 'cellama[worker]'"
    if "llama_cpp" in missing and not has_compiler():
        found += ". A C++ compiler, which builds llama.cpp, is also missing"
        compiler = "xcode-select --install" if sys.platform == "darwin" else "apt-get install build-essential"
        remedy = (
            f"for a worker: {compiler}, and then pip install 'cellama[worker]'; or install a wheel of llama-cpp-python "
            "(docs/how-to/install.md, Install without a compiler)"
        )
    return Finding("warning", "llama.cpp", found, remedy)


def has_compiler() -> bool:
    """Return whether a C++ compiler is installed."""
    return bool(os.environ.get("CXX")) or any(map(shutil.which, COMPILERS))


def read_build(argv: tuple[str, ...] = (sys.executable, "-m", "cellama.engine.llama")) -> dict[str, Any] | Finding:
    """Return the llama.cpp build as reported by a child process, because `api` never imports the engine."""
    rebuild = _rebuild_remedy()
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        found = f"llama.cpp did not start within {BUILD_TIMEOUT_S:g} s"
        return Finding("error", "llama.cpp", found, "check the driver of the GPU, for example with `nvidia-smi`")
    with contextlib.suppress(ValueError, IndexError):
        if done.returncode == 0:
            build: dict[str, Any] = json_module.loads(done.stdout.splitlines()[-1])
            return build
    if done.returncode == -signal.SIGILL:
        return Finding("error", "llama.cpp", "it was built for another CPU: illegal instruction", rebuild)
    cause = next(reversed(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
    return Finding("error", "llama.cpp", f"can't be loaded: {cause}", rebuild)


def _install_command(option: str = "") -> str:
    """Return the command that rebuilds llama.cpp with this CMake option."""
    requirement = "llama-cpp-python"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        declared = importlib.metadata.requires("cellama") or []
        found = (each.partition(";")[0].strip() for each in declared if each.startswith(requirement))
        requirement = next(found, requirement)
    command = f"pip install --no-cache-dir --force-reinstall --no-deps '{requirement}'"
    return f"CMAKE_ARGS={option} {command}" if option else command


def _rebuild_remedy() -> str:
    """Return the remedy for a llama.cpp build that does not match this machine's CPU."""
    if has_compiler():
        return f"rebuild llama.cpp on this machine: {_install_command()}"
    return (
        "build a wheel on a machine with a compiler, and pip install it here "
        "(docs/how-to/install.md, Install without a compiler)"
    )


def cpu_flags(path: Path = CPU_INFO) -> set[str]:
    """Return the CPU features by their Linux names, or an empty set on other systems."""
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return set(value.split())
    return set()


def cpu_findings(features: list[str], flags: set[str], variant: str = "") -> Iterable[Finding]:
    """Compare the CPU features that the llama.cpp build uses with the features that this CPU has.

    `features` are the build's features, and `flags` are the CPU's features. If there are no flags, the features are not
    compared. If llama.cpp chose the best `variant` for this CPU, features that the variant lacks are not reported.
    """
    used = [name for name in features if name in CPU_FLAGS]
    absent = [name for name in used if CPU_FLAGS[name] not in flags] if flags else []
    unused = [name for name, flag in CPU_FLAGS.items() if flag in flags and name not in features]
    if absent:
        found = f"llama.cpp uses {', '.join(absent)}, which this CPU lacks, so workers crash"
        yield Finding("error", "CPU", found, _rebuild_remedy())
    if unused and not variant:
        found = f"llama.cpp does not use {', '.join(unused)} of this CPU, so it is slower than necessary"
        yield Finding("warning", "CPU", found, _rebuild_remedy())
    if "AMX_INT8" in features:
        found = "llama.cpp was built with AMX, which cellama disables because it can crash"
        yield Finding(
            "warning", "CPU", found, "for faster prefill, build without AMX (docs/how-to/install.md, CPUs with AMX)"
        )
    if variant and not absent:
        yield Finding("ok", "CPU", f"llama.cpp chose its variant {variant}, which uses {', '.join(used)}")
    elif not absent and not unused:
        yield Finding("ok", "CPU", f"llama.cpp uses {', '.join(used)}")


def seen_gpus(folder: Path = PCI_DEVICES) -> list[str]:
    """Return the vendor of each GPU in this machine, even if the GPU has no driver."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return ["Apple"]
    vendors = []
    with contextlib.suppress(OSError):
        for device in sorted(folder.iterdir()):
            with contextlib.suppress(OSError):
                vendor = GPU_VENDORS.get((device / "vendor").read_text().strip())
                if vendor and (device / "class").read_text().startswith(DISPLAY_CLASS):
                    vendors.append(vendor)
    return vendors


def gpu_findings(build: dict[str, Any], seen: list[str]) -> Iterable[Finding]:
    """Yield the GPUs that llama.cpp can use, or the reason why it can't use this machine's GPUs."""
    if build["gpus"]:
        yield Finding("ok", "GPU", ", ".join(build["gpus"]))
        return
    shown = ", ".join(f"{seen.count(vendor)} × {vendor}" for vendor in dict.fromkeys(seen))
    if not seen:
        yield Finding("ok", "GPU", "none")
    elif not build["supports_gpu"]:
        remedy = f"to use it, rebuild llama.cpp: {_install_command(GPU_OPTIONS[seen[0]])}"
        yield Finding("warning", "GPU", f"{shown}, not used, because llama.cpp is built for the CPU only", remedy)
    else:
        found = f"{shown}, not used, because llama.cpp finds no usable device"
        remedy = "install the driver; check CUDA_VISIBLE_DEVICES; start a container with the GPU (`--gpus all`)"
        yield Finding("warning", "GPU", found, remedy)


# Redis


def check_redis(settings: Settings) -> Iterable[Finding]:
    """Check the configured Redis server's version, memory, persistence, clock and workers."""
    limits = {"socket_connect_timeout": REDIS_TIMEOUT_S, "socket_timeout": REDIS_TIMEOUT_S}
    with connect(settings.redis_url, retry=Retry(NoBackoff(), 0), **limits) as redis:
        try:
            with reaching_redis():
                redis.ping()
                clock = clock_difference_s(redis)
                workers = live_workers(redis)
        except JobError as error:
            problem, _, remedy = str(error).partition("; ")
            yield Finding("error", "Redis", problem, remedy)
            return
        yield from server_findings(redis, settings.redis_url_masked)
        yield clock_finding(clock)
        yield from worker_findings(workers)


def server_findings(redis: Redis, shown_url: str) -> Iterable[Finding]:
    """Check the server's version, and whether its settings keep jobs safe."""
    try:
        info: dict[str, Any] = redis.info()
    except RedisError as error:
        remedy = "allow the command (docs/redis.md, Users), or run this command with the URL of a worker's user"
        yield Finding("warning", "Redis", f"{shown_url} answers, but INFO failed: {error}", remedy)
        return
    yield version_finding(info, shown_url)
    yield from memory_findings(info)
    yield persistence_finding(info)
    try:
        with reaching_redis():
            probe_writes(redis)
    except JobError as error:
        problem, _, remedy = str(error).partition("; ")
        yield Finding("error", "Redis writes", problem, remedy)


def version_finding(info: dict[str, Any], shown_url: str) -> Finding:
    """Return a finding about whether cellama supports this Redis server."""
    is_valkey = "valkey_version" in info
    version = str(info.get("redis_version", ""))  # Valkey reports the version of Redis that it is compatible with
    shown = f"{'Valkey' if is_valkey else 'Redis'} {info['valkey_version'] if is_valkey else version} at {shown_url}"
    if info.get("cluster_enabled"):
        problem, _, remedy = CLUSTER.partition("; ")
        return Finding("error", "Redis", problem, remedy)
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers and numbers < MIN_REDIS:
        return Finding("error", "Redis", f"{shown} is too old", "install Redis 6.2 or newer, or Valkey")
    return Finding("ok", "Redis", shown)


def memory_findings(info: dict[str, Any]) -> Iterable[Finding]:
    """Check whether Redis can evict jobs, and whether its memory is nearly full."""
    limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    shown = f"{readable(used)} used of {readable(limit) if limit else 'unlimited memory'}"
    problem = _problem("maxmemory-policy", info)
    if problem is not None:
        yield Finding("error", "Redis memory", problem, REDIS_REMEDIES["maxmemory-policy"])
    if limit and used > NEARLY_FULL * limit:
        found = f"{shown}: it is nearly full"
        yield Finding("warning", "Redis memory", found, "raise maxmemory, or lower CELLAMA_RESULT_TTL_S")
    elif problem is None:
        yield Finding("ok", "Redis memory", f"{shown}, maxmemory-policy noeviction")


def persistence_finding(info: dict[str, Any]) -> Finding:
    """Return a finding about whether jobs survive a Redis crash."""
    if problem := _problem("appendonly", info):
        return Finding("warning", "Redis persistence", problem, REDIS_REMEDIES["appendonly"])
    if info.get("aof_last_write_status", "ok") != "ok":
        found = "Redis can't write its append-only file"
        return Finding(
            "error", "Redis persistence", found, "free up space on the disk of the Redis server, and read its log"
        )
    return Finding("ok", "Redis persistence", "appendonly yes")


def _problem(setting: str, info: dict[str, Any]) -> str | None:
    """Return the problem with a Redis setting in the words that workers log, without the remedy."""
    return next((text.partition("; ")[0] for text in problems_of(info) if text.startswith(setting)), None)


def clock_difference_s(redis: Redis) -> float:
    """Return how many seconds this machine's clock is ahead of the Redis clock."""
    before = time.time()
    at_redis = redis_time(redis)
    return (before + time.time()) / 2 - at_redis


def clock_finding(difference_s: float) -> Finding:
    """Return a finding about whether the clocks of this machine and Redis agree."""
    if abs(difference_s) <= MAX_CLOCK_DIFFERENCE_S:
        return Finding("ok", "clock", f"less than {MAX_CLOCK_DIFFERENCE_S:g} s from the clock of Redis")
    direction = "ahead of" if difference_s > 0 else "behind"
    found = f"{abs(difference_s):.1f} s {direction} the clock of Redis, so log times and the ETA of plain Celery differ"
    return Finding("warning", "clock", found, "synchronize both clocks, for example with `timedatectl set-ntp true`")


def worker_findings(workers: list[WorkerEntry], version: str | None = None) -> Iterable[Finding]:
    """Compare the live workers' versions with each other and with this command's `version`."""
    version = cellama_version() if version is None else version
    if not workers:
        yield Finding("ok", "workers", "none is running; `cellama up` or `cellama worker` starts one")
        return
    cellama = {version: ["this command"]}
    llguidance: dict[str, list[str]] = {}
    for worker in workers:
        cellama.setdefault(worker.cellama or "older", []).append(worker.name)
        llguidance.setdefault(worker.llguidance or "older", []).append(worker.name)
    if len(cellama) > 1:
        found = f"versions of cellama differ: {_versions(cellama)}; they may not be able to read each other's data"
        remedy = "upgrade all to one version (docs/operations/restarts.md, Upgrade cellama)"
        yield Finding("warning", "workers", found, remedy)
    if len(llguidance) > 1:
        found = (
            f"versions of llguidance differ: {_versions(llguidance)}; constrained jobs can't resume on a worker with "
            "another version"
        )
        yield Finding("warning", "workers", found, "install the same version on all workers (docs/compatibility.md)")
    if len(cellama) == len(llguidance) == 1:
        yield Finding("ok", "workers", f"{plural(len(workers), 'worker')} with cellama {version}")


def _versions(names: dict[str, list[str]]) -> str:
    return ", ".join(f"{version} ({_names(found)})" for version, found in sorted(names.items()))


def _names(names: list[str]) -> str:
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


# Disk and ports


def check_disk(settings: Settings) -> Iterable[Finding]:
    """Check the free space in the directories that cellama writes to."""
    yield directory_finding("data_dir", settings.data_dir.expanduser())
    if settings.cache_dir is not None:
        folder = Path(settings.cache_dir).expanduser()
        yield directory_finding("cache_dir", folder, max(0, settings.cache_disk_bytes - _used_bytes(folder)))


def _used_bytes(folder: Path) -> int:
    """Return the total size of all files in a directory. Files that workers delete in the meantime are skipped."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def directory_finding(setting: str, folder: Path, needed_bytes: int = 0) -> Finding:
    """Return a finding about whether a directory is writable and has enough free space.

    The directory may not exist yet.
    """
    existing = next(each for each in (folder, *folder.parents) if os.path.exists(each))  # False without access
    free = shutil.disk_usage(existing).free
    shown = f"{setting} {folder}: {readable(free)} free"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        remedy = f"give this user access, or set CELLAMA_{setting.upper()} to another directory"
        return Finding("error", "disk", f"{setting} {folder}: this user can't write to {existing}", remedy)
    if free < MIN_FREE_BYTES:
        remedy = f"free some space, or set CELLAMA_{setting.upper()} to a directory on another disk"
        return Finding("error", "disk", shown, remedy)
    if free < needed_bytes:
        found = f"{shown}, less than the {readable(needed_bytes)} that its quota still allows"
        return Finding("warning", "disk", found, "lower CELLAMA_CACHE_DISK_BYTES, or choose another directory")
    return Finding("ok", "disk", shown)


@dataclass(frozen=True, slots=True)
class Port:
    """The default port of a cellama service, and how to recognize the service on that port."""

    service: str
    number: int
    path: str
    sign: str  # text in the first bytes of the response, including its headers
    remedy: str
    host: str = LOOPBACK


def check_ports(settings: Settings) -> Iterable[Finding]:
    """Check whether each cellama service's port is free, used by that service, or used by another program."""
    choose = "if you use this service, choose another port with"
    ports = [
        Port("gateway", GATEWAY_PORT, "/health", '{"status":"ok"}', f"{choose} `cellama gateway --port`"),
        Port("Flower", FLOWER_PORT, "/", "TornadoServer", f"{choose} `cellama up --flower-port`"),
        Port("metrics", METRICS_PORT, "/metrics", "cellama_", f"{choose} `cellama metrics --port`"),
    ]
    if settings.metrics_port is not None:
        remedy = "set another CELLAMA_METRICS_PORT, unless it is used by a worker"
        host = settings.metrics_host
        ports.append(Port("metrics_port", settings.metrics_port, "/metrics", "cellama_", remedy, host))
    yield from port_findings(ports)


def port_findings(ports: list[Port]) -> Iterable[Finding]:
    """Yield one finding for all usable ports, and one for each port that another program uses."""
    usable: dict[str, list[str]] = {"free": [], "in use by cellama": []}
    for port in ports:
        try:
            check_port_free(port.number, port.remedy, port.host)
            usable["free"].append(f"{port.number} ({port.service})")
        except PortTaken as error:
            if _is_service(port):
                usable["in use by cellama"].append(f"{port.number} ({port.service})")
            else:
                yield Finding("warning", "ports", f"{port.service}: {str(error).partition('; ')[0]}", port.remedy)
    if found := "; ".join(f"{state}: {', '.join(names)}" for state, names in usable.items() if names):
        yield Finding("ok", "ports", found)


def _is_service(port: Port) -> bool:
    """Return whether the cellama service answers on this port."""
    connection = http.client.HTTPConnection(port.host, port.number, timeout=HTTP_TIMEOUT_S)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", port.path)
        response = connection.getresponse()
        text = f"{response.headers}{response.read(1 << 16).decode(errors='replace')}"
        return port.sign in text
    return False
