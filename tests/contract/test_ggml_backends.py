"""Test how the backends of llama.cpp are loaded if they are separate files. A build with such files runs all tests."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellama.engine.errors import ModelLoadFailed
from cellama.engine.llama import ggml_backends
from cellama.engine.llama.backend import end_threads
from cellama.engine.llama.devices import machine

FILES = {"libggml-base.so", "libggml-cpu-haswell.so", ggml_backends.AMX_VARIANT, "libllama.so"}


@pytest.fixture
def backend_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with backends of a build that has not loaded them yet."""
    for name in FILES:
        (tmp_path / name).touch()
    monkeypatch.setattr(ggml_backends, "LIBRARIES", tmp_path)
    monkeypatch.setattr(ggml_backends, "_num_backends", lambda: 0)
    ggml_backends.load_backends.cache_clear()
    yield tmp_path
    ggml_backends.load_backends.cache_clear()


def test_all_backend_files_except_amx_are_loaded(backend_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[set[str]] = []

    def load_all(folder: bytes) -> None:
        loaded.append({name for name in os.listdir(os.fsdecode(folder)) if (backend_files / name).exists()})

    monkeypatch.setattr(ggml_backends, "_load_all", load_all)
    monkeypatch.setattr(ggml_backends, "_backend", lambda name: 1)
    for _ in range(2):
        ggml_backends.load_backends()
    assert loaded == [{"libggml-base.so", "libggml-cpu-haswell.so"}]


def test_missing_cpu_backend_error_contains_the_directory_and_the_remedy(
    backend_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ggml_backends, "_load_all", lambda folder: None)
    monkeypatch.setattr(ggml_backends, "_backend", lambda name: None)
    with pytest.raises(ModelLoadFailed, match="contains no backend for this CPU; reinstall llama-cpp-python") as caught:
        ggml_backends.load_backends()
    assert str(backend_files) in str(caught.value)


def test_cpu_backend_has_a_device_and_a_library_with_openmp() -> None:
    library = ggml_backends.cpu_library()
    assert library.name.startswith("libggml-cpu")
    assert ctypes.CDLL(str(library)).omp_pause_resource_all
    end_threads()
    assert machine()["cpu"] != "unknown"


def test_reported_variant_matches_the_loaded_library(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"libggml-cpu-zen4.so": "zen4", "libggml-cpu-armv8.2_1.so": "armv8.2_1", "libggml-cpu.so.0": ""}
    for name, variant in names.items():
        monkeypatch.setattr(ggml_backends, "cpu_library", lambda name=name: Path(name))
        assert ggml_backends.cpu_variant() == variant
