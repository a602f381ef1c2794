"""Tests that a damaged model file raises an error and does not crash the process."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import gguf
import pytest

from cellama.bench.models.synthetic import Shape, write_model
from cellama.engine import EngineOptions, ModelLoadFailed, ModelManager
from cellama.engine.memory.budget import AvailableMemory
from cellama.engine.models import memory_admission
from cellama.engine.models.memory_admission import plan_in_child

SIZES: dict[str, Any] = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_head_kv": 2,
    "n_ff": 96,
    "n_vocab": 320,
    "n_ctx": 512,
}
OPTIONS = EngineOptions(n_parallel=2, ctx_per_slot=64, threads=1)


class TokenTwice(Shape):
    def add_tokenizer(self, writer: gguf.GGUFWriter) -> None:
        super().add_tokenizer(writer)
        tokens = writer.kv_data[-1]["tokenizer.ggml.tokens"].value
        tokens[10] = tokens[11]


class WithNumber(Shape):
    """A model shape in which one number of the file's header is replaced."""

    key, number = "", 0

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        writer.kv_data[-1][f"llama.{self.key}"].value = self.number


def damaged(key: str, number: int) -> type[Shape]:
    return type("Damaged", (WithNumber,), {"key": key, "number": number})


DAMAGES = {
    "a token twice": TokenTwice,
    "too many layers": damaged("block_count", 100_000),
    "no layers": damaged("block_count", 0),
    "no heads": damaged("attention.head_count", 0),
    "too many heads": damaged("attention.head_count", 2**31),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_rejected_and_the_process_continues(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, DAMAGES[damage](**SIZES), file_type="F32")
    manager = ModelManager("unlimited")
    try:
        with pytest.raises(ModelLoadFailed, match=r"m\.gguf.*download or convert it again"):
            manager.load("m", str(path), options=OPTIONS)
        assert manager.entries() == []
    finally:
        manager.close()


def test_planning_succeeds_or_raises_load_error_when_bytes_are_damaged(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, Shape(**SIZES), file_type="F32")
    whole, rng = path.read_bytes(), random.Random(5)
    head = whole.rindex(b"output.weight") + 40
    for _ in range(8):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 3))):
            damaged[rng.randrange(8, head)] = rng.choice((0, 1, 127, 255))
        path.write_bytes(damaged)
        with contextlib.suppress(ModelLoadFailed):
            assert plan_in_child("m", path, OPTIONS, None, AvailableMemory({})).footprint.total_bytes > 0


def test_planning_is_aborted_after_its_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_admission, "TIMEOUT_S", 0.01)
    with pytest.raises(ModelLoadFailed, match=r"planning the load of .*m\.gguf' took longer than 0\.01 s"):
        plan_in_child("m", tmp_path / "m.gguf", OPTIONS, None, AvailableMemory({}))


def test_planning_is_aborted_when_it_needs_too_much_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, Shape(**SIZES), file_type="F32")
    monkeypatch.setattr(memory_admission, "MIN_DATA_BYTES", 1 << 20)
    monkeypatch.setattr(memory_admission, "ram", lambda: (0, 0))
    with pytest.raises(ModelLoadFailed, match=r"m\.gguf"):
        plan_in_child("m", path, OPTIONS, None, AvailableMemory({}))
