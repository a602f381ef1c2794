"""The provenance of a job, which the first attempt records and later attempts need."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from cellama.tasks.contract import events
from cellama.tasks.state.history import (
    Past,
    Provenance,
    grammar_changed,
    may_be_served,
    provenance_of,
    provenance_of_event,
)
from cellama.tasks.state.registry import WorkerEntry

from ....conftest import worker_entry


def adapter(name: str, scale: float = 1.0, fingerprint: str = "", status: str = "ready") -> Any:
    return SimpleNamespace(name=name, scale=scale, fingerprint=fingerprint or f"sha-{name}", status=status)


def model(*adapters: Any, fingerprint: str = "sha", sampling: Any = None) -> Any:
    info, options = SimpleNamespace(fingerprint=fingerprint), SimpleNamespace(sampling_defaults=sampling or {})
    return SimpleNamespace(info=info, adapters=lambda: list(adapters), options=options)


def worker(*models: Any) -> WorkerEntry:
    return worker_entry("w", *models)


def test_provenance_contains_the_adapters_of_the_job_or_the_default_adapters() -> None:
    here = model(adapter("a", 0.5), adapter("b", 0), adapter("c", status="loading"))
    assert provenance_of(here, None).choice == (("a", 0.5),)
    assert provenance_of(here, (("b", 2.0), ("a", 0.0), ("unknown", 1.0))).choice == (("b", 2.0),)
    chunk = provenance_of(here, None, also=["b"])
    assert chunk.choice == (("a", 0.5),)
    assert [name for name, _, _ in chunk.adapters] == ["a", "b"]


def test_provenance_matches_only_identical_files() -> None:
    begun = provenance_of(model(adapter("a")), None)
    assert begun.is_in(model(adapter("x"), adapter("a", scale=0.1)))
    assert not begun.is_in(model())
    assert not begun.is_in(model(adapter("a"), fingerprint="other"))
    assert not begun.is_in(model(adapter("a", fingerprint="other")))
    assert not begun.is_in(model(adapter("a", status="unloading")))


def test_provenance_survives_the_journal() -> None:
    begun, past = provenance_of(model(adapter("a", 0.25), sampling={"top_k": 3}), None), Past()
    past.add({"seq": 0, **events.started("m", 3, "w", 7), **begun.fields()})
    assert past.provenance == begun
    assert begun.sampling == {"top_k": 3}
    assert provenance_of_event({"type": "started", "seed": 1}) is None


def test_job_can_continue_if_a_worker_has_or_loads_its_model_and_adapters() -> None:
    begun = Provenance("sha", (("a", "sha-a", 1.0),))
    full = {"id": "m", "status": "ready", "default": False, "fingerprint": "sha"}
    full["adapters"] = [{"name": "a", "fingerprint": "sha-a"}]
    assert may_be_served([worker(), worker(full)], "m", begun)
    assert may_be_served([worker({**full, "default": True})], ":default", begun)
    assert may_be_served([worker({"id": "m", "status": "loading", "default": False})], "m", begun)
    for other in ({"fingerprint": "other"}, {"adapters": []}, {"id": "n"}):
        assert not may_be_served([worker({**full, **other})], "m", begun)
    assert not may_be_served([worker(full)], ":default", begun)


def test_llguidance_version_survives_the_journal_when_the_text_is_constrained() -> None:
    for version in ("1.9.1", None):
        begun = replace(provenance_of(model(), None), llguidance=version)
        assert ("llguidance" in begun.fields()) == (version is not None)
        past = Past()
        past.add({"seq": 0, **events.started("m", 3, "w", 7), **begun.fields()})
        assert past.provenance == begun


def test_constrained_job_continues_only_on_a_worker_with_its_llguidance_version() -> None:
    entry = {"id": "m", "status": "ready", "default": False, "fingerprint": "sha"}
    workers = {version: replace(worker(entry), llguidance=version) for version in ("", "1.9.1", "1.9.2")}
    loading = replace(worker({"id": "m", "status": "loading", "default": False}), llguidance="1.9.2")
    for begun in ("", "1.9.1"):
        constrained = Provenance("sha", llguidance=begun)
        assert [version for version, one in workers.items() if may_be_served([one], "m", constrained)] == [begun]
        assert not may_be_served([loading], "m", constrained)
    assert all(may_be_served([one], "m", Provenance("sha")) for one in workers.values())


def test_constrained_job_error_names_both_llguidance_versions() -> None:
    error = grammar_changed(Provenance("sha", llguidance="1.9.1"), "2.0.0")
    assert (error.code, error.retryable, error.http_status) == ("grammar_changed", True, 409)
    assert "llguidance 1.9.1" in str(error)
    assert "2.0.0" in str(error)
    assert "without llguidance" in str(grammar_changed(Provenance("sha", llguidance=""), "2.0.0"))
