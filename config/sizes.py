"""Sizes of memory as people write them."""

from __future__ import annotations

import re
from typing import Any

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_size(text: str) -> int | None:
    """Bytes of `8GB` (8·10⁹), `8GiB` (8·2³⁰), `8G` (as GB) or plain digits; None for what is no size."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    step = 1024 if match[3] else 1000
    return int(float(match[1]) * step ** " kmgt".index(match[2].lower() or " "))


def parse_budget(value: Any) -> Any:
    """`auto` and `unlimited` as they are, sizes in bytes. Raises ValueError for what is none of these."""
    if value in ("auto", "unlimited"):
        return value
    size = parse_size(str(value))
    if not size:
        raise ValueError("it must be auto, unlimited, or a size such as 8GB, 8GiB or 8000000000")
    return size
