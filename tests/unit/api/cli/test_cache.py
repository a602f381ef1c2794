"""Test `cellama cache` on a directory of KV states, without a worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cellama.api.cli import app
from cellama.engine.kvstore.keys import seed_of
from cellama.engine.kvstore.states import StoredState
from cellama.engine.kvstore.store import StateStore

IDENTITY = b"model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a directory with one state in each of two scopes."""
    with closing(StateStore(tmp_path / "kv", 1 << 20, IDENTITY)) as store:
        for scope in ("a", "b"):
            state = StoredState(seed_of(IDENTITY, (), scope), range(100), 0, bytes(1000), {}, scope)
            store.offer(partial(replace, state), 1.0, state.num_bytes)
            store.flush(float("inf"))
    return tmp_path / "kv"


def cache(folder: Path, *argv: str, code: int = 0) -> Any:
    """Run the command and return its output, parsed if it is JSON."""
    done = CliRunner().invoke(app, ["cache", *argv, "--dir", str(folder)])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout) if "--json" in argv else done.output


def test_cache_commands_list_pin_and_clear_states_by_scope_and_key(folder: Path) -> None:
    states = cache(folder, "list", "--json")
    assert [(state["scope"], state["num_tokens"], state["problem"]) for state in states] == [
        ("b", 100, None),
        ("a", 100, None),
    ]
    keys = [state["key"] for state in states]
    assert "is pinned" in cache(folder, "pin", keys[0][:8])
    assert cache(folder, "clear", "--json")["num_states"] == 1
    info = cache(folder, "info", "--json")
    assert (info["num_states"], info["num_pinned"], info["num_identities"]) == (1, 1, 1)
    assert cache(folder, "clear", "--scope", "a", "--pinned", "--json")["num_states"] == 0
    assert cache(folder, "unpin", keys[0], "--json") == {keys[0]: True}
    assert "removed 1 state (" in cache(folder, "clear", keys[0])


def test_cache_list_and_info_print_text(folder: Path) -> None:
    (damaged, *_) = folder.glob("*/*.kv")
    damaged.write_bytes(b"short")
    listed = cache(folder, "list")
    assert "damaged" in listed
    assert damaged.stem[:16] in listed
    assert "2 states of 1 model\n" in cache(folder, "info")
    assert "no KV states in" in cache(folder.parent / "none", "list")


@pytest.mark.parametrize("key", ["", "../../x", "abc", "f" * 64])
def test_cache_pin_rejects_keys_without_a_state(folder: Path, key: str) -> None:
    assert "no states have a key that starts with" in cache(folder, "pin", key, code=1)


def test_cache_clear_rejects_keys_combined_with_a_scope(folder: Path) -> None:
    cache(folder, "clear", "0" * 64, "--scope", "a", code=2)


def test_cache_uses_the_directory_of_the_settings_by_default(
    folder: Path, settings_environment: Callable[..., None]
) -> None:
    none = CliRunner().invoke(app, ["cache", "info"])
    assert (none.exit_code, "the cache_dir setting is not set" in " ".join(none.output.split())) == (2, True)
    settings_environment(cache_dir=str(folder))
    done = CliRunner().invoke(app, ["cache", "info", "--json"])
    assert json.loads(done.stdout)["num_states"] == 2
