"""Events of a job → events of Anthropic's streams. Pure.

`message_start`, blocks one after another (`content_block_start`, `_delta`, `_stop`), `message_delta` with the whole
usage, `message_stop`. A thought comes before the text, calls of tools come whole behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cellama.api.openai.answers import warnings_of

from .answers import TIERS, begun, calls_of, stop_of, usage_of

PING = {"type": "ping"}
_THOUGHTS = ("reasoning", "reasoning_end")


@dataclass
class MessageStream:
    """The events of one message."""

    message_id: str
    model: str
    tier: str
    max_tokens: int
    shows_thoughts: bool = True
    thinking_tokens: int = 0
    _has_begun: bool = False
    _open: str | None = None  # the type of the block that is open
    _index: int = -1  # of that block, or the one before
    _events: list[dict[str, Any]] = field(default_factory=list)

    def of(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events that an event of the job becomes."""
        kind = event["type"]
        if kind == "started":
            self.model = event["model"]
            self._begin(event["prompt_tokens"])
        elif kind in _THOUGHTS:
            self.thinking_tokens += len(event["tokens"])
            self._think(event)
        elif kind == "token" and event["text"]:
            self._within("text", {"text": ""})
            self._delta({"type": "text_delta", "text": event["text"]})
        elif kind == "done":
            self._end(event)
        events, self._events = self._events, []
        return events

    def _begin(self, num_read: int = 0) -> None:
        """Once. How much of the prompt was cached is known at the end only."""
        if self._has_begun:
            return
        self._has_begun = True
        usage = usage_of({"prompt_tokens": num_read, "cached_tokens": 0, "completion_tokens": 0})
        message = begun(self.message_id, self.model, {**usage, "service_tier": TIERS[self.tier]})
        self._events.append({"type": "message_start", "message": message})

    def _think(self, event: Mapping[str, Any]) -> None:
        self._within("thinking", {"thinking": "", "signature": ""})
        if not self.shows_thoughts:
            return
        if event["type"] == "reasoning":
            if event["text"]:
                self._delta({"type": "thinking_delta", "thinking": event["text"]})
        elif event["signature"]:
            self._delta({"type": "signature_delta", "signature": event["signature"]})

    def _end(self, done: Mapping[str, Any]) -> None:
        self._begin(done["usage"]["prompt_tokens"])
        calls = done.get("tool_calls") or []
        for call, block in zip(calls, calls_of(calls), strict=True):
            self._close()
            self._within("tool_use", {**block, "input": {}})
            self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})
        self._close()
        usage = usage_of(done["usage"], self.thinking_tokens)
        end = {"type": "message_delta", "delta": stop_of(done, self.max_tokens), "usage": usage}
        self._events.append({**end, **warnings_of([done])})
        self._events.append({"type": "message_stop"})

    def _within(self, kind: str, block: Mapping[str, Any]) -> None:
        """A block of that type is open."""
        self._begin()
        if self._open == kind:
            return
        self._close()
        self._open, self._index = kind, self._index + 1
        self._events.append(
            {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **block}}
        )

    def _delta(self, delta: dict[str, Any]) -> None:
        self._events.append({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> None:
        if self._open is not None:
            self._events.append({"type": "content_block_stop", "index": self._index})
            self._open = None
