"""A journal → the typed, numbered events of a response, and its object (docs/adr/020-responses.md).

Pure: the same record and journal give the same, whenever and wherever. `Fold` takes the events of a job in their order,
from the first one on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cellama.api.openai.answers import warnings_of, was_cut_in_thought
from cellama.api.openai.chunks import reasoning_tokens_of
from cellama.tasks.contract.codes import message_for_clients

from .output import OutputItems
from .record import ResponseRecord

_REASONS = {"length": "max_output_tokens", "timeout": "max_output_tokens"}  # what ran out of time is cut off as well
_STATUSES = {"stop": "completed", "cancelled": "cancelled"}


class Fold:
    """The events of one response so far, added up."""

    def __init__(self, record: ResponseRecord) -> None:
        self._record = record
        self._output = OutputItems(
            record.id.removeprefix("resp_"), record.params.get("logprobs") is not None, record.shows_signatures
        )
        self._next = 0
        self._reasoning_tokens = 0
        self._status = "queued" if record.background else "in_progress"
        self._end: dict[str, Any] = {}

    def begin(self) -> list[dict[str, Any]]:
        """Return the events before the first one of the journal, which need the record alone."""
        events = [{"type": "response.created", "response": self.response()}]
        if self._record.background:
            events.append({"type": "response.queued", "response": self.response()})
        return self._numbered(events)

    def of(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events that the next event of the journal becomes."""
        kind = event["type"]
        if kind == "started":
            self._status = "in_progress"
            return self._numbered([{"type": "response.in_progress", "response": self.response()}])
        if kind in ("token", "reasoning"):
            self._reasoning_tokens += reasoning_tokens_of(event)
            as_item = "message" if kind == "token" else "reasoning"
            return self._numbered(self._output.add(as_item, event["text"], event.get("logprobs") or ()))
        if kind == "reasoning_end":
            self._reasoning_tokens += reasoning_tokens_of(event)
            return self._numbered(self._output.close(signature=event["signature"]))
        if kind == "done":
            return self._numbered(self._done(event))
        return self._numbered(self._failed(event)) if kind == "error" else []

    def response(self) -> dict[str, Any]:
        """The object, as of the last event."""
        return {
            **self._record.shown,
            "id": self._record.id,
            "object": "response",
            "created_at": self._record.created_at,
            "completed_at": None,
            "status": self._status,
            "background": self._record.background,
            "store": self._record.store,
            "error": None,
            "incomplete_details": None,
            "output": list(self._output.items),
            "usage": None,
            **self._end,
        }

    def _done(self, event: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
        reason = event["finish_reason"]
        status = _STATUSES.get(reason, "incomplete")
        yield from self._output.close(is_whole=status == "completed")
        for call in event.get("tool_calls") or ():
            yield from self._output.call(call)
        if status == "completed" and not self._output.has_answer:
            yield from self._output.empty_message()
        self._end = {"usage": _usage(event["usage"], self._reasoning_tokens), **warnings_of([event])}
        if reason in _REASONS:
            self._end["incomplete_details"] = {"reason": _REASONS[reason]}
        if status == "completed":
            took_s = event.get("timings", {}).get("duration_ms", 0.0) / 1000
            self._end["completed_at"] = int(self._record.created_at + took_s)
        yield self._ended(status)

    def _failed(self, event: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
        yield from self._output.close(is_whole=False)
        code = "server_error"
        if event["code"] in ("prompt_too_long", "invalid_request"):
            code = "invalid_prompt"
        message = message_for_clients(event["code"], event["message"])
        self._end = {"error": {"code": code, "message": f"{event['code']}: {message}"}}
        yield self._ended("failed")

    def _ended(self, status: str) -> dict[str, Any]:
        self._status = status
        return {"type": f"response.{status}", "response": self.response()}

    def _numbered(self, events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        numbered = [{**event, "sequence_number": number} for number, event in enumerate(events, self._next)]
        self._next += len(numbered)
        return numbered


def journal_of_result(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Events that come to the same as those of which the result was made, but for the counts of thoughts, and for the
    logprobs of a text after thoughts: a result does not say where they begin."""
    message = result["message"]
    events: list[dict[str, Any]] = []
    if thoughts := message.get("reasoning"):
        events.append({"type": "reasoning", "text": thoughts, "tokens": []})
        if not was_cut_in_thought(result):
            events.append({"type": "reasoning_end", "signature": message.get("signature", ""), "tokens": []})
    text, entries = message["content"] or "", None if thoughts else result.get("logprobs")
    if text:
        events.append({"type": "token", "text": text, "tokens": [], **({"logprobs": entries} if entries else {})})
    done = {"type": "done", "finish_reason": result["finish_reason"], "usage": result["usage"]}
    calls = {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
    key = {"finish_key": result["finish_key"]} if "finish_key" in result else {}
    return [*events, {**done, "timings": result.get("timings", {}), **calls, **key, **warnings_of([result])}]


def _usage(usage: Mapping[str, Any], reasoning_tokens: int) -> dict[str, Any]:
    read, written = usage["prompt_tokens"], usage["completion_tokens"]
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": usage["cached_tokens"], "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": read + written,
    }
