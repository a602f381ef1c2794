"""Make characters that could hide or reorder text visible, so that hostile model output can't imitate the page.

The templates and `textContent` escape HTML markup. Control characters and directional overrides are valid text in HTML,
so escaping does not affect them.
"""

from __future__ import annotations

_PICTURES = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)}  # ␀ to ␟, except tab and newline
_DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))  # embeddings, overrides and isolates
_NAMED = {code: f"[U+{code:04X}]" for code in (*range(0x80, 0xA0), *_DIRECTIONS)}
_TABLE: dict[int, int | str] = {**_PICTURES, 0x7F: 0x2421, **_NAMED}


def visible(text: str) -> str:
    """Return the text with each control character and directional override replaced by a visible symbol.

    Newlines and tabs are kept. Text in right-to-left scripts is displayed correctly without directional overrides.
    """
    return text.replace("\r\n", "\n").translate(_TABLE)
