"""Conversion of a message's times from the clock of its producer to that of the worker."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from cellama.tasks.broker.message import set_by_this_clock
from cellama.tasks.contract.names import SUBMITTED_AT_HEADER


def at(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat()


@pytest.mark.parametrize("ahead_s", [-60.0, 0.0, 60.0])
def test_message_times_are_converted_to_the_workers_clock(ahead_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9)
    sent_at = 1e9 - 5 + ahead_s  # five seconds ago, by a clock that is `ahead_s` fast
    headers = {"id": "j", SUBMITTED_AT_HEADER: sent_at, "eta": at(sent_at + 20), "expires": at(sent_at + 45)}
    set_by_this_clock(headers, waited_s=5)
    assert headers["eta"] == at(1e9 + 15)
    assert headers["expires"] == at(1e9 + 40)


@pytest.mark.parametrize("sent_at", [None, "soon", float("inf"), 1e308])
def test_message_times_are_unchanged_when_the_submission_time_is_invalid(sent_at: Any) -> None:
    headers = {"id": "j", SUBMITTED_AT_HEADER: sent_at, "eta": at(1e9), "expires": None}
    set_by_this_clock(headers, waited_s=5)
    assert headers["eta"] == at(1e9)
