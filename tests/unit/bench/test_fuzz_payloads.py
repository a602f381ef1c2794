"""The payloads of the fuzz benchmark are hostile and reproducible, and can be sent."""

from __future__ import annotations

import json
from collections import Counter

from cellama.bench.benchmarks.faults.hostile import corpus
from cellama.bench.benchmarks.faults.hostile_forms import hostile_form
from cellama.bench.benchmarks.faults.payloads import TASKS, payload
from cellama.config import limits
from cellama.tasks import app
from cellama.tasks.contract.errors import InvalidJob


def test_corpus_entries_have_unique_names_and_can_be_sent() -> None:
    entries = corpus()
    assert len({entry.name for entry in entries}) == len(entries)
    assert all(json.dumps([entry.args, entry.kwargs, entry.headers]) for entry in entries)
    assert {entry.task for entry in entries} == set(TASKS)


def test_payload_depends_on_its_seed() -> None:
    shown = [json.dumps([payload(1, n).task, payload(1, n).args, payload(1, n).kwargs]) for n in range(50)]
    assert shown == [json.dumps([payload(1, n).task, payload(1, n).args, payload(1, n).kwargs]) for n in range(50)]
    assert json.dumps([payload(2, 7).task, payload(2, 7).args, payload(2, 7).kwargs]) != shown[7]


def test_payloads_cover_every_task_with_valid_and_invalid_payloads() -> None:
    passed: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for number in range(600):
        one = payload(0, number)
        try:
            app.tasks[one.task].parse(one.args, one.kwargs)
            passed[one.task] += 1
        except InvalidJob:
            refused[one.task] += 1
    assert passed.keys() == refused.keys() == set(TASKS)


def test_hostile_formats_depend_on_the_seed_and_mostly_respect_the_size_limits() -> None:
    def shown(seed: int) -> list[str]:
        return [json.dumps([form.args, form.kwargs]) for form in (hostile_form(seed, n) for n in range(170))]

    assert shown(0) == shown(0)
    assert shown(0) != shown(1)
    assert len({hostile_form(0, n).name.split()[1] for n in range(170)}) == 16  # kinds
    assert sum(len(text) <= limits.MAX_SCHEMA_CHARS for text in shown(0)) > 150
