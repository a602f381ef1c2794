"""Commands that arrive while a worker reconciles its models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fakeredis
import pytest

from cellama.config import ModelSettings
from cellama.engine import UnknownModel
from cellama.tasks.worker.commands import ModelChanges
from cellama.tasks.worker.desired_state import DesiredStateRecord, Override, model_key

BIG = model_key("big")
DESIRED = Override(model=ModelSettings(id="big", source="big.gguf"))


def changes(desired: Override | None, *, leaving: bool) -> tuple[ModelChanges, DesiredStateRecord]:
    """Return the changes of a worker that lacks the model `big`, and is loading or unloading it."""

    def get(model_id: str) -> None:
        raise UnknownModel(f"model {model_id!r} is on its way")

    record = DesiredStateRecord(fakeredis.FakeRedis(), "p", "one")
    if desired is not None:
        record.write(BIG, desired, whole_pool=True)
    manager: Any = SimpleNamespace(is_loaded=lambda _: False, is_leaving=lambda _: leaving, get=get)
    loader: Any = SimpleNamespace(busy={"big"}, failed={})
    return ModelChanges(manager, None, loader, record, lambda _: 0), record


def test_unload_removes_a_model_from_the_desired_state_during_a_retry_of_its_load() -> None:
    commands, record = changes(DESIRED, leaving=False)
    commands.unload("big", 1.0)
    assert record.read()[BIG][0].gone


@pytest.mark.parametrize(("desired", "leaving"), [(None, False), (DESIRED, True)])
def test_unload_rejects_an_unknown_or_unloading_model(desired: Override | None, leaving: bool) -> None:
    commands, record = changes(desired, leaving=leaving)
    before = record.read()
    with pytest.raises(UnknownModel):
        commands.unload("big", 1.0)
    assert record.read() == before
