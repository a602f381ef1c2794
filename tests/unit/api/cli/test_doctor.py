"""Test the checks of `cellama doctor` with descriptions of machines, builds and servers."""

from __future__ import annotations

import http.server
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cellama.api.cli import app, doctor
from cellama.api.cli.doctor import Finding, Port
from cellama.api.machine.redis_server import LOOPBACK
from cellama.config import get_settings
from cellama.tasks.connection.kombu_internals import PRODUCER_PARTS, READER_PARTS
from cellama.tasks.contract.codes import Exit
from cellama.tasks.state.registry import WorkerEntry

from ....conftest import worker_entry

HEALTHY = {"redis_version": "7.2.4", "maxmemory_policy": "noeviction", "aof_enabled": 1, "used_memory": 1 << 20}
CPU_BUILD: dict[str, Any] = {"version": "0.3.36", "features": ["AVX"], "supports_gpu": False, "gpus": []}


def levels(findings: Iterable[Finding]) -> list[str]:
    return [finding.level for finding in findings]


def test_check_that_raises_or_hangs_becomes_an_error() -> None:
    released = threading.Event()

    def fail() -> Iterator[Finding]:
        yield Finding("ok", "broken", "the first part")
        raise ZeroDivisionError("a mistake")

    checks: dict[str, doctor.Check] = {
        "fine": lambda: [Finding("ok", "fine", "all of it")],
        "broken": fail,
        "stuck": lambda: [Finding("ok", "stuck", str(released.wait()))],
    }
    fine, broken, stuck = doctor.run_checks(checks, timeout_s=2.0)
    released.set()
    assert (fine.level, broken.level, stuck.level) == ("ok", "error", "error")
    assert "ZeroDivisionError: a mistake" in broken.found
    assert "no result after 2 s" in stuck.found


def test_output_fits_into_80_columns_and_indents_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=80, record=True)
    monkeypatch.setattr(doctor, "out", console)
    long = "a rather long text " * 8
    doctor.print_findings([Finding("ok", "Python", "3.11"), Finding("error", "Redis persistence", long, f"do {long}")])
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert max(map(len, lines)) <= 80
    assert next(line for line in lines if "→" in line).startswith(" " * 22 + "→ do a rather")
    assert lines[-1] == "1 error"


def test_invalid_settings_are_reported_and_other_checks_run(settings_environment: Callable[..., None]) -> None:
    settings_environment(lease_s="soon", redis_url="redis://:s3cret@[/0")
    done = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(done.stdout)
    found = {each["name"]: each for each in report["findings"]}
    assert (done.exit_code, report["ok"], found["settings"]["level"]) == (Exit.FAILED, False, "error")
    assert "lease_s" in found["settings"]["found"]
    assert {"Python", "packages", "llama.cpp"} <= found.keys()
    assert "s3cret" not in done.output


def test_producers_require_fewer_private_apis_than_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    required: list[tuple[str, ...]] = []
    monkeypatch.setattr(doctor, "require_parts", lambda *paths: required.append(paths))
    for modules in (("sys",), ("a_missing_module",)):
        monkeypatch.setattr(doctor, "WORKER_MODULES", modules)
        assert levels(doctor.check_packages()) == ["ok"]
    assert required == [(), (*PRODUCER_PARTS, *READER_PARTS)]


def test_doctor_suggests_a_remedy_for_unused_and_absent_cpu_features() -> None:
    assert levels(doctor.cpu_findings(["AVX", "OPENMP"], {"avx"})) == ["ok"]
    (unused,) = doctor.cpu_findings(["AVX"], {"avx", "avx2", "fma"})
    assert (unused.level, "AVX2, FMA" in unused.found) == ("warning", True)
    (absent,) = doctor.cpu_findings(["AVX", "AVX512"], {"avx"})
    assert (absent.level, "AVX512" in absent.found) == ("error", True)
    for finding in (unused, absent):
        assert "pip install" in finding.remedy
        assert "llama-cpp-python<" in finding.remedy
    assert levels(doctor.cpu_findings(["AVX", "AMX_INT8"], {"avx", "amx_int8"})) == ["warning", "ok"]
    assert levels(doctor.cpu_findings(["AVX"], set())) == ["ok"]  # no /proc/cpuinfo


def test_slow_build_remedy_suggests_another_machine_when_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    (unused,) = doctor.cpu_findings(["AVX"], {"avx", "avx2"})
    assert "on a machine with a compiler" in unused.remedy


def test_chosen_llama_cpp_variant_is_reported_and_need_not_use_every_cpu_feature() -> None:
    (chosen,) = doctor.cpu_findings(["AVX", "AVX2"], {"avx", "avx2", "avx512f"}, "haswell")
    assert (chosen.level, chosen.found) == ("ok", "llama.cpp chose its variant haswell, which uses AVX, AVX2")
    assert levels(doctor.cpu_findings(["AVX", "AVX2"], {"avx"}, "haswell")) == ["error"]


def test_cpu_flags_are_read_on_x86_and_arm(tmp_path: Path) -> None:
    for name in ("flags\t\t", "Features\t"):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{name}: avx asimd\n\nprocessor\t: 1\n")
        assert doctor.cpu_flags(tmp_path / "cpuinfo") == {"avx", "asimd"}
    assert doctor.cpu_flags(tmp_path / "missing") == set()


@pytest.fixture
def pci(tmp_path: Path) -> Path:
    """Return the PCI devices of a machine with two NVIDIA GPUs, their audio device, and a server's VGA controller."""
    devices = {"a": ("0x10de", "0x030200"), "b": ("0x10de", "0x030000"), "c": ("0x10de", "0x040300")}
    for name, (vendor, kind) in {**devices, "d": ("0x1a03", "0x030000")}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="reads sysfs")
def test_doctor_suggests_a_remedy_for_gpus_that_the_build_does_not_use(pci: Path) -> None:
    seen = doctor.seen_gpus(pci)
    assert seen == ["NVIDIA", "NVIDIA"]
    (cpu_build,) = doctor.gpu_findings(CPU_BUILD, seen)
    assert (cpu_build.level, "2 × NVIDIA" in cpu_build.found) == ("warning", True)
    assert "CMAKE_ARGS=-DGGML_CUDA=on pip install" in cpu_build.remedy
    (no_driver,) = doctor.gpu_findings({**CPU_BUILD, "supports_gpu": True}, seen)
    assert (no_driver.level, "driver" in no_driver.remedy) == ("warning", True)
    assert levels(doctor.gpu_findings({**CPU_BUILD, "supports_gpu": True, "gpus": ["H100"]}, seen)) == ["ok"]
    assert levels(doctor.gpu_findings(CPU_BUILD, doctor.seen_gpus(pci / "missing"))) == ["ok"]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "illegal instruction"),
        ("import a_missing_package", "No module named 'a_missing_package'"),
        ("raise SystemExit(7)", "exit code 7"),
        ("pass", "can't be loaded"),
    ],
)
def test_build_that_cannot_be_loaded_is_an_error(code: str, found: str) -> None:
    finding = doctor.read_build((sys.executable, "-c", code))
    assert isinstance(finding, Finding)
    assert (finding.level, found in finding.found, "pip install" in finding.remedy) == ("error", True, True)


def test_build_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BUILD_TIMEOUT_S", 0.2)
    finding = doctor.read_build((sys.executable, "-c", "import threading; threading.Event().wait()"))
    assert isinstance(finding, Finding)
    assert (finding.level, finding.found) == ("error", "llama.cpp did not start within 0.2 s")


def test_build_on_this_machine_is_described() -> None:
    build = doctor.read_build()
    assert not isinstance(build, Finding), build
    assert build["version"]
    assert isinstance(build["features"], list)
    assert isinstance(build["cpu_variant"], str)


def test_old_redis_servers_and_clusters_are_errors() -> None:
    assert doctor.version_finding(HEALTHY, "URL") == Finding("ok", "Redis", "Redis 7.2.4 at URL")
    assert "Valkey 9.1.2" in doctor.version_finding({**HEALTHY, "valkey_version": "9.1.2"}, "URL").found
    old = doctor.version_finding({**HEALTHY, "redis_version": "6.0.16"}, "URL")
    cluster = doctor.version_finding({**HEALTHY, "cluster_enabled": 1}, "URL")
    assert levels([old, cluster]) == ["error", "error"]
    assert old.remedy
    assert cluster.remedy


def test_doctor_suggests_remedies_for_eviction_full_memory_and_missing_persistence() -> None:
    assert levels(doctor.memory_findings(HEALTHY)) == ["ok"]
    (policy,) = doctor.memory_findings({**HEALTHY, "maxmemory_policy": "allkeys-lru"})
    assert (policy.level, "CONFIG SET maxmemory-policy noeviction" in policy.remedy) == ("error", True)
    (full,) = doctor.memory_findings({**HEALTHY, "maxmemory": (1 << 20) + 1})
    assert (full.level, "raise maxmemory" in full.remedy) == ("warning", True)
    assert doctor.persistence_finding(HEALTHY).level == "ok"
    assert doctor.persistence_finding({**HEALTHY, "aof_enabled": 0}).level == "warning"
    assert doctor.persistence_finding({**HEALTHY, "aof_last_write_status": "err"}).level == "error"


def test_clock_that_differs_from_the_redis_clock_is_a_warning() -> None:
    assert doctor.clock_finding(-0.4).level == "ok"
    assert "120.0 s behind the clock of Redis" in doctor.clock_finding(-120.0).found
    assert "2.5 s ahead of" in doctor.clock_finding(2.5).found


def test_directory_is_checked_for_access_and_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.directory_finding("data_dir", tmp_path / "a" / "b").level == "ok"
    assert doctor.directory_finding("cache_dir", tmp_path, 1 << 60).level == "warning"
    (tmp_path / "file").touch()
    unusable = doctor.directory_finding("data_dir", tmp_path / "file" / "a")
    assert (unusable.level, "CELLAMA_DATA_DIR" in unusable.remedy) == ("error", True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "can't write" in doctor.directory_finding("data_dir", tmp_path).found
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "MIN_FREE_BYTES", 1 << 60)
    assert doctor.directory_finding("data_dir", tmp_path).level == "error"


def test_cache_dir_check_subtracts_stored_states_from_the_quota(
    tmp_path: Path, settings_environment: Callable[..., None]
) -> None:
    (tmp_path / "kv" / "ab").mkdir(parents=True)
    (tmp_path / "kv" / "ab" / "state").write_bytes(bytes(1000))
    for quota, level in ((1 << 60, "warning"), (1000, "ok")):
        settings_environment(data_dir=str(tmp_path), cache_dir=str(tmp_path / "kv"), cache_disk_bytes=str(quota))
        assert levels(doctor.check_disk(get_settings())) == ["ok", level]


class Flower(http.server.BaseHTTPRequestHandler):
    """A server that answers as Flower does when it requires a password."""

    server_version = "TornadoServer/6.5"

    def do_GET(self) -> None:
        self.send_response(401)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_port_is_usable_when_it_is_free_or_used_by_its_service() -> None:
    with http.server.HTTPServer((LOOPBACK, 0), Flower) as server, socket.create_server((LOOPBACK, 0)) as other:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flower = Port("Flower", server.server_port, "/", "TornadoServer", "choose another port")
        taken = Port("gateway", other.getsockname()[1], "/health", "ok", "choose another port")
        warning, usable = doctor.port_findings([flower, taken])
        server.shutdown()
    assert (warning.level, "is taken by another program" in warning.found) == ("warning", True)
    assert (usable.level, usable.found) == ("ok", f"in use by cellama: {server.server_port} (Flower)")


def test_workers_with_different_versions_are_named() -> None:
    def entry(name: str, cellama: str, llguidance: str = "1.9.1") -> WorkerEntry:
        return replace(worker_entry(name), cellama=cellama, llguidance=llguidance)

    assert levels(doctor.worker_findings([], "1.0")) == ["ok"]
    assert levels(doctor.worker_findings([entry("a", "1.0"), entry("b", "1.0")], "1.0")) == ["ok"]
    several = [entry("a", "1.0"), entry("b", "1.1"), *(entry(name, "") for name in "cdef")]
    (versions,) = doctor.worker_findings(several, "1.0")
    assert versions.level == "warning"
    assert "1.0 (this command, a), 1.1 (b), older (c, d, e and 1 more)" in versions.found
    (grammar,) = doctor.worker_findings([entry("a", "1.0"), entry("b", "1.0", "2.0")], "1.0")
    assert "versions of llguidance differ: 1.9.1 (a), 2.0 (b)" in grammar.found
