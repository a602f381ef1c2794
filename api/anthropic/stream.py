"""Convert a job's events into Anthropic stream events.

A stream consists of `message_start`, one block after another (`content_block_start`, `_delta`, `_stop`),
`message_delta` with the usage, and `message_stop`. Reasoning precedes the text, and tool calls usually follow the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cellama.api.openai.answers import warnings_of
from cellama.api.openai.call_progress import CallProgress, Delta

from .answers import CALL_PREFIX, TIERS, empty_message, stop_of, usage_of

PING = {"type": "ping"}
_REASONING = ("reasoning", "reasoning_end")


@dataclass
class MessageStream:
    """Converts a job's events into the stream of one message, and tracks the stream's state between events."""

    message_id: str
    model: str
    tier: str
    max_tokens: int
    shows_reasoning: bool = True
    thinking_tokens: int = 0
    _has_started: bool = False
    _open: str | None = None  # type of the open block
    _index: int = -1  # index of the open block, or of the last block if none is open
    _events: list[dict[str, Any]] = field(default_factory=list)
    _calls: CallProgress = field(default_factory=CallProgress)

    def of(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Process a job event, and return the stream events that it produces."""
        kind = event["type"]
        if kind == "started":
            self.model = event["model"]
            self._start(event["prompt_tokens"])
        elif kind in _REASONING:
            self.thinking_tokens += len(event["tokens"])
            self._think(event)
        elif kind == "token":
            if event["text"]:
                self._open_block("text", {"text": ""})
                self._delta({"type": "text_delta", "text": event["text"]})
            self._call(self._calls.of(event))
        elif kind == "done":
            self._end(event)
        events, self._events = self._events, []
        return events

    def _start(self, prompt_tokens: int = 0) -> None:
        """Start the message unless it has already started.

        The number of cached tokens is not known until the stream ends.
        """
        if self._has_started:
            return
        self._has_started = True
        usage = usage_of({"prompt_tokens": prompt_tokens, "cached_tokens": 0, "completion_tokens": 0})
        message = empty_message(self.message_id, self.model, {**usage, "service_tier": TIERS[self.tier]})
        self._events.append({"type": "message_start", "message": message})

    def _think(self, event: Mapping[str, Any]) -> None:
        self._open_block("thinking", {"thinking": "", "signature": ""})
        if not self.shows_reasoning:
            return
        if event["type"] == "reasoning":
            if event["text"]:
                self._delta({"type": "thinking_delta", "thinking": event["text"]})
        elif event["signature"]:
            self._delta({"type": "signature_delta", "signature": event["signature"]})

    def _end(self, done: Mapping[str, Any]) -> None:
        self._start(done["usage"]["prompt_tokens"])
        self._call(self._calls.rest(done.get("tool_calls") or ()))
        self._close()
        usage = usage_of(done["usage"], self.thinking_tokens)
        end = {"type": "message_delta", "delta": stop_of(done, self.max_tokens), "usage": usage}
        self._events.append({**end, **warnings_of([done])})
        self._events.append({"type": "message_stop"})

    def _call(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            if "id" in delta:
                self._close()
                self._open_block("tool_use", {"id": CALL_PREFIX + delta["id"], "name": delta["name"], "input": {}})
            if delta["arguments"]:
                self._delta({"type": "input_json_delta", "partial_json": delta["arguments"]})

    def _open_block(self, kind: str, block: Mapping[str, Any]) -> None:
        """Open a block of this type, unless a block of this type is already open."""
        self._start()
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
