"""The context of a trace as text, which travels in headers of messages and of HTTP requests (W3C Trace Context)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRACEPARENT = "traceparent"
NAMES = (TRACEPARENT, "tracestate")
MAX_CHARS = 512  # what the standard asks all to take


def carried(headers: Mapping[str, Any]) -> dict[str, str]:
    """The context among these headers; empty without one, or with what can be none."""
    found = {name: headers[name] for name in NAMES if isinstance(headers.get(name), str)}
    return found if TRACEPARENT in found and all(len(text) <= MAX_CHARS for text in found.values()) else {}
