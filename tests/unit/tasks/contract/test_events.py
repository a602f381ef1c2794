"""The table of event types."""

from __future__ import annotations

from typing import get_args, get_type_hints

from cellama.tasks.contract.events import EVENT_CLASSES, OUTPUT_TYPES, Event


def test_each_event_type_except_ping_has_a_class() -> None:
    types = {get_args(get_type_hints(event)["type"])[0] for event in get_args(Event)}
    assert set(EVENT_CLASSES) == types - {"ping"}
    assert {EVENT_CLASSES[type] for type in OUTPUT_TYPES} == {"progress"}
