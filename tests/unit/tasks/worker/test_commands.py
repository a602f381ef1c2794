"""Commands that meet what a worker is just doing by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cellama.config import ModelSettings
from cellama.engine import UnknownModel
from cellama.tasks.worker.commands import Changes
from cellama.tasks.worker.wanted import Key, Said, Spoken, model_key

BIG = model_key("big")
SAID = Said(model=ModelSettings(id="big", source="big.gguf"))


def changes(said: dict[Key, Said], *, leaving: bool) -> tuple[Changes, list[tuple[Key, Said]]]:
    """Of a worker that has no model `big`, but is about to load it or to let go of it."""

    def get(model_id: str) -> None:
        raise UnknownModel(f"model {model_id!r} is on its way")

    written: list[tuple[Key, Said]] = []
    manager: Any = SimpleNamespace(is_loaded=lambda _: False, is_leaving=lambda _: leaving, get=get)
    residency: Any = SimpleNamespace(busy={BIG}, forget_failure=lambda _: None)
    record: Any = SimpleNamespace(spoken=Spoken(said), say=lambda key, what, **_: written.append((key, what)))
    return Changes(manager, None, residency, record, lambda _: 0), written


def test_model_whose_load_is_tried_again_just_now_is_wanted_no_more() -> None:
    commands, written = changes({BIG: SAID}, leaving=False)
    commands.unload("big", 1.0)
    assert written == [(BIG, Said(gone=True))]


@pytest.mark.parametrize(("said", "leaving"), [({}, False), ({BIG: SAID}, True)])
def test_model_that_was_never_there_or_leaves_already_can_not_be_unloaded(said: dict[Key, Said], leaving: bool) -> None:
    commands, written = changes(said, leaving=leaving)
    with pytest.raises(UnknownModel):
        commands.unload("big", 1.0)
    assert written == []
