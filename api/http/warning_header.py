"""The header that lists what an answer does not enforce."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

WARNINGS = "x-cellama-warnings"
MAX_HEADER_CHARS = 2048  # proxies take 4 to 8 KiB for all headers of an answer together


def warning_headers(answer: Mapping[str, Any]) -> dict[str, str]:
    """Return the header for the `warnings` of an answer: a JSON array in ASCII. The last ones are left out if they are
    too long together, and counted instead."""
    warnings: list[str] = answer.get("warnings", [])
    if not warnings:
        return {}
    num_shown, value = len(warnings), json.dumps(warnings)
    while len(value) > MAX_HEADER_CHARS:
        num_shown -= 1
        value = json.dumps([*warnings[:num_shown], f"and {len(warnings) - num_shown} more"])
    return {WARNINGS: value}
