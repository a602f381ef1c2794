"""Test Anthropic's format of models and of pages."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import ModelInfo

from cellama.api.anthropic.models import model_info, page_of

MODELS = [{"id": name} for name in "abcde"]


def test_model_info_is_valid_for_the_client() -> None:
    view: Any = {"id": "tiny", "ready_at": 1700000000.5, "ctx_per_slot": 2048}
    info = ModelInfo.model_validate(model_info(view))
    assert (info.id, info.display_name, info.lifecycle) == ("tiny", "tiny", "active")
    assert (info.max_input_tokens, info.created_at.timestamp()) == (2047, 1700000000)
    unknown: Any = {"id": "tiny"}
    assert ModelInfo.model_validate(model_info(unknown)).max_tokens is None


@pytest.mark.parametrize(
    ("limit", "cursors", "ids", "has_more"),
    [
        (2, {}, "ab", True),
        (5, {}, "abcde", False),
        (2, {"after_id": "b"}, "cd", True),
        (2, {"after_id": "c"}, "de", False),
        (2, {"after_id": "e"}, "", False),
        (2, {"before_id": "e"}, "cd", True),
        (2, {"before_id": "c"}, "ab", False),
        (9, {"before_id": "a"}, "", False),
    ],
)
def test_pages_start_and_end_at_the_cursors(limit: int, cursors: dict[str, str], ids: str, has_more: bool) -> None:
    page = page_of(MODELS, limit, **cursors)
    assert ("".join(model["id"] for model in page["data"]), page["has_more"]) == (ids, has_more)
    assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))


def test_unknown_cursor_is_an_error() -> None:
    with pytest.raises(ValueError, match="is not in list"):
        page_of(MODELS, 2, "x")
