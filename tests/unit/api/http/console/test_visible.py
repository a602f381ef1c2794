"""Characters that could hide or reorder text are shown as symbols."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis.strategies import text

from cellama.api.http.console.visible import visible


def test_visible_keeps_text_in_all_scripts() -> None:
    for kept in ("Hello, world!\n\tDone.", "Größe 3 °C – 5 €", "مرحبا بالعالم", "שלום", "日本語", "👩‍👩‍👧 e\u0301"):
        assert visible(kept) == kept


def test_visible_replaces_characters_that_hide_or_reorder_text() -> None:
    assert visible("\x1b[31m\x00\r") == "␛[31m␀␍"
    assert visible("a\r\nb") == "a\nb"
    assert visible("\u202egnp.exe\u2069\x9b\x7f") == "[U+202E]gnp.exe[U+2069][U+009B]␡"


@given(text())
def test_visible_leaves_no_control_character(drawn: str) -> None:
    shown = visible(drawn)
    assert not [char for char in shown if unicodedata.category(char) == "Cc" and char not in "\n\t"]
    assert not [char for char in shown if unicodedata.bidirectional(char) in {"LRE", "RLE", "LRO", "RLO", "PDF"}]
    assert visible(shown) == shown
