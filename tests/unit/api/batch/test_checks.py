"""Test the checks before a run starts, which reject files that the run can't read or write."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest

from cellama.api.batch.checks import check_files
from cellama.api.batch.options import BatchOptions
from cellama.tasks.contract.errors import InvalidJob

LINES = '{"id": 1, "prompt": "Once upon a time"}\n{"id": 2, "prompt": "Hi"}\n'


def check(tmp_path: Path, data: bytes, name: str = "in.jsonl", output: str = "out.jsonl", **more: Any) -> None:
    (tmp_path / name).write_bytes(data)
    check_files(BatchOptions(tmp_path / name, tmp_path / output, **more))


@pytest.mark.parametrize("name", ["x.jsonl", "x.ndjson", "x.json", "x.out", "x", "x.v2", "x.2026-01-31", "x.txt"])
def test_check_files_accepts_output_names_that_imply_no_other_format(tmp_path: Path, name: str) -> None:
    check(tmp_path, LINES.encode(), output=name)
    check(tmp_path, LINES.encode(), errors=tmp_path / name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("X.XLSX", "because xlsx is not an output format; use .jsonl, .csv, .tsv, .parquet or .arrow"),
        ("x.jsonl.bz2", "because bz2 is not an output format"),
        ("x.pickle", "because pickle is not an output format"),
        ("x.parquet.gz", "parquet files are already compressed; remove '.gz'"),
        ("nowhere/x.jsonl", "directory '.*/nowhere' not found; create it"),
        (".", "is not a file; choose a file"),
    ],
)
def test_check_files_rejects_output_names_that_imply_other_formats(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(InvalidJob, match=message):
        check(tmp_path, LINES.encode(), output=name)
    with pytest.raises(InvalidJob, match=message):
        check(tmp_path, LINES.encode(), errors=tmp_path / name)


@pytest.mark.parametrize("name", ["x.csv", "x.TSV", "x.parquet", "x.feather", "x.jsonl.gz", "x.csv.zst"])
def test_check_files_accepts_tables_for_results_but_not_for_errors(tmp_path: Path, name: str) -> None:
    check(tmp_path, LINES.encode(), output=name)
    with pytest.raises(InvalidJob, match=r"errors are JSON lines and can't be written to .*; use a \.jsonl file"):
        check(tmp_path, LINES.encode(), errors=tmp_path / name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "Sum up"}, "template: 'Sum up' has no column; insert columns as {name}"),
        ({"template": "{a"}, "template: expected '}' before end of string; write {{ or }} for a brace"),
        ({"template": "{a}", "column": "b"}, "--column and --template can't be combined"),
        ({"limit": 2, "sample": 2}, "--limit and --sample can't be combined"),
        ({"limit": 0}, "limit: 0 is not a valid number of rows"),
        ({"params": {"n": 2}, "output": "x.csv"}, "n: 2 results per line don't fit into one row of .*x.csv"),
    ],
)
def test_check_files_rejects_options_that_contradict_each_other(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidJob, match=message):
        check(tmp_path, LINES.encode(), **options)


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.csv.zst"])
def test_check_files_checks_the_contents_of_compressed_input(tmp_path: Path, name: str) -> None:
    def compress(data: bytes) -> bytes:
        return gzip.compress(data) if name.endswith(".gz") else bytes(pyarrow.compress(data, "zstd", asbytes=True))

    check(tmp_path, compress(LINES.encode()), name)
    with pytest.raises(InvalidJob, match="is UTF-16 text"):
        check(tmp_path, compress(LINES.encode("utf-16")), name)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (LINES.encode("utf-16"), "is UTF-16 text, but must be UTF-8 text; convert it with `iconv -f UTF-16 -t UTF-8"),
        (LINES.encode("utf-16-le"), "seems to be UTF-16LE text"),
        (LINES.encode("utf-16-be"), "seems to be UTF-16BE text"),
        (b"\xfe\xff" + LINES.encode("utf-16-be"), "is UTF-16 text"),
        (LINES.encode("utf-32"), "is UTF-32 text"),
        (gzip.compress(LINES.encode()), "is compressed with gzip, but must be UTF-8 text; convert it with `gzip -dc"),
        (bz2.compress(LINES.encode()), "is compressed with bzip2"),
        (lzma.compress(LINES.encode()), "is compressed with xz"),
        (b"PK\x03\x04rest", "a ZIP archive or an Excel file, but must be UTF-8 text; extract it, or export"),
        (b"PAR1rest", "is a Parquet file, .* ends with .parquet, or add --format parquet"),
    ],
    ids=["utf-16", "utf-16-le", "utf-16-be", "utf-16-be-bom", "utf-32", "gzip", "bzip2", "xz", "zip", "parquet"],
)
@pytest.mark.parametrize("name", ["in.jsonl", "in.txt", "in.csv"])
def test_check_files_rejects_input_that_is_not_utf8_text(
    tmp_path: Path, name: str, data: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidJob, match=message):
        check(tmp_path, data, name)
    with (tmp_path / name).open("rb") as stdin:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stdin))
        with pytest.raises(InvalidJob, match=f"stdin .*{message}"):
            check_files(BatchOptions(Path("-"), Path("-")))
        assert stdin.read() == data  # no byte was consumed


@pytest.mark.parametrize("text", [LINES, "\ufeff" + LINES, '{"prompt": "狐狸 \\u0000"}\n', "Once upon a time\0\n", ""])
def test_check_files_accepts_utf8_text(tmp_path: Path, text: str) -> None:
    check(tmp_path, text.encode())
    check_files(BatchOptions(tmp_path / "in.jsonl", Path("-")))


def test_check_files_rejects_an_output_in_the_input_directory(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    check_files(BatchOptions(tmp_path / "notes", tmp_path / "out.csv"))
    with pytest.raises(InvalidJob, match=r"out\.csv' is in the input directory; write the output to another directory"):
        check_files(BatchOptions(tmp_path / "notes", tmp_path / "notes" / "out.csv"))


def test_check_files_error_names_the_extra_when_pyarrow_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for names in (("in.parquet", "out.jsonl"), ("in.jsonl", "out.arrow")):
        with pytest.raises(InvalidJob, match=r"missing packages: pyarrow; run `pip install 'cellama\[parquet\]'`"):
            check(tmp_path, LINES.encode(), *names)


def test_check_files_accepts_parquet(tmp_path: Path) -> None:
    check(tmp_path, b"PAR1rest", "in.parquet")
    check(tmp_path, b"PAR1rest", "in.data", format="parquet")


def test_check_files_accepts_stdin_without_peek(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(LINES.encode())))
    check_files(BatchOptions(Path("-"), Path("-")))
