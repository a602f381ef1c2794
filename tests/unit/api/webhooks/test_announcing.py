"""Test the announcement of events to webhooks."""

from __future__ import annotations

from typing import get_args

import pytest

from cellama.api.webhooks.announcing import announced, announcement, event_id
from cellama.tasks.contract.shapes.results import FinishReason


@pytest.mark.parametrize("end", [*get_args(FinishReason), "error"])
def test_every_job_outcome_maps_to_a_response_outcome(end: str) -> None:
    heeded = b'{"kind": "response", "object": "resp_1", "tenant": ""}'
    received = announced({b"heeded": heeded, b"end": end.encode()})
    assert received == announcement(received["type"], "resp_1", None)


def test_event_id_is_stable_and_unique_per_object() -> None:
    ids = {event_id(kind, thing) for kind in ("batch.failed", "batch.expired") for thing in ("batch_1", "batch_2")}
    assert len(ids) == 4
    assert event_id("batch.failed", "batch_1") in ids
