"""Convert a job's journal into a response and its numbered events (docs/adr/020-responses.md).

The conversion is pure, so the same record and journal always produce the same events. `ResponseEvents` needs all events
of a job in order, starting with the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cellama.api.openai.answers import chat_logprobs, ended_in_reasoning, warnings_of
from cellama.api.openai.call_progress import CallProgress, Delta
from cellama.api.openai.chunks import reasoning_tokens_of
from cellama.tasks.contract.codes import message_for_clients

from .record import ResponseRecord
from .tools import names_of

_REASONS = {"length": "max_output_tokens", "timeout": "max_output_tokens"}  # a response that timed out is cut off
_STATUSES = {"stop": "completed", "cancelled": "cancelled"}


class ResponseEvents:
    """Converts a job's events into response events, and tracks the response's state."""

    def __init__(self, record: ResponseRecord) -> None:
        self._record = record
        self._output = OutputItems(
            record.id.removeprefix("resp_"),
            record.params.get("logprobs") is not None,
            record.shows_signatures,
            names_of(record.shown.get("tools", [])),
        )
        self._next_number = 0
        self._calls = CallProgress()
        self._reasoning_tokens = 0
        self._status = "queued" if record.background else "in_progress"
        self._end: dict[str, Any] = {}

    def start(self) -> list[dict[str, Any]]:
        """Return the events that precede the first event of the journal.

        These first events depend only on the record.
        """
        events = [{"type": "response.created", "response": self.response()}]
        if self._record.background:
            events.append({"type": "response.queued", "response": self.response()})
        return self._numbered(events)

    def of(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Process the next journal event, and return the response events that it produces."""
        kind = event["type"]
        if kind == "started":
            self._status = "in_progress"
            return self._numbered([{"type": "response.in_progress", "response": self.response()}])
        if kind in ("token", "reasoning"):
            self._reasoning_tokens += reasoning_tokens_of(event)
            item_type = "message" if kind == "token" else "reasoning"
            added = self._output.add(item_type, event["text"], event.get("logprobs") or ())
            return self._numbered([*added, *self._output.add_calls(self._calls.of(event))])
        if kind == "reasoning_end":
            self._reasoning_tokens += reasoning_tokens_of(event)
            return self._numbered(self._output.close(signature=event["signature"]))
        if kind == "done":
            return self._numbered(self._done(event))
        return self._numbered(self._failed(event)) if kind == "error" else []

    def response(self) -> dict[str, Any]:
        """Return the response object in its state after the last processed event."""
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
        calls = event.get("tool_calls") or []
        yield from self._output.add_calls(self._calls.rest(calls))
        yield from self._output.close(
            is_complete=not calls[-1].get("partial") if self._output.is_in_call else status == "completed"
        )
        if status == "completed" and not self._output.has_answer:
            yield from self._output.empty_message()
        self._end = {
            "usage": usage_of(event["usage"], self._reasoning_tokens),
            **warnings_of([self._record.shown, event]),
        }
        if reason in _REASONS:
            self._end["incomplete_details"] = {"reason": _REASONS[reason]}
        if status == "completed":
            duration_s = event.get("timings", {}).get("duration_ms", 0.0) / 1000
            self._end["completed_at"] = int(self._record.created_at + duration_s)
        yield self._ended(status)

    def _failed(self, event: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
        yield from self._output.close(is_complete=False)
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
        numbered = [{**event, "sequence_number": number} for number, event in enumerate(events, self._next_number)]
        self._next_number += len(numbered)
        return numbered


def journal_of_result(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return events that produce the same response as the job's expired events.

    A result lacks two details: the number of reasoning tokens, and the position in the logprobs at which the reasoning
    ends.
    """
    message = result["message"]
    events: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning"):
        events.append({"type": "reasoning", "text": reasoning, "tokens": []})
        if not ended_in_reasoning(result):
            events.append({"type": "reasoning_end", "signature": message.get("signature", ""), "tokens": []})
    text, entries = message["content"] or "", None if reasoning else result.get("logprobs")
    if text:
        events.append({"type": "token", "text": text, "tokens": [], **({"logprobs": entries} if entries else {})})
    done = {"type": "done", "finish_reason": result["finish_reason"], "usage": result["usage"]}
    calls = {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
    key = {"finish_key": result["finish_key"]} if "finish_key" in result else {}
    return [*events, {**done, "timings": result.get("timings", {}), **calls, **key, **warnings_of([result])}]


def usage_of(usage: Mapping[str, Any], reasoning_tokens: int) -> dict[str, Any]:
    """Return a job's token counts, using this API's names."""
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": usage["cached_tokens"], "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": prompt + completion,
    }


# The output items, and their events


@dataclass(slots=True)
class _Open:
    """The item that is currently being generated, which is reasoning, a message or a call."""

    kind: str  # reasoning, message or function_call
    item_id: str
    index: int  # among the items
    call_id: str = ""
    called: Mapping[str, str] = field(default_factory=dict)  # name of the function, and its namespace if it has one
    texts: list[str] = field(default_factory=list)  # pieces of the text, or of the arguments
    logprobs: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class OutputItems:
    """The complete items of a response, and the item that is being generated. Item ids contain `response_id`."""

    response_id: str
    with_logprobs: bool = False
    with_signatures: bool = False
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # of functions in namespaces
    items: list[dict[str, Any]] = field(default_factory=list)
    _open: _Open | None = None

    def add(self, kind: str, text: str, entries: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Add reasoning or text. If an open item has a different kind, this item is completed first."""
        if not text and not entries:
            return
        if self._open is not None and self._open.kind != kind:
            yield from self.close()
        opened = self._open
        if opened is None:
            opened = self._open = self._opened(kind)
            yield from self._added(opened)
        opened.texts.append(text)
        common = {**_place(opened), "content_index": 0, "delta": text}
        if kind == "reasoning":
            yield {"type": "response.reasoning_text.delta", **common}
            return
        logprobs = chat_logprobs(entries)["content"] if self.with_logprobs else []
        opened.logprobs += logprobs
        yield {"type": "response.output_text.delta", **common, "logprobs": logprobs}

    def close(self, *, is_complete: bool = True, signature: str = "") -> Iterator[dict[str, Any]]:
        """Complete the open item or mark it as incomplete."""
        if (opened := self._open) is None:
            return
        self._open = None
        text, status = "".join(opened.texts), "completed" if is_complete else "incomplete"
        if opened.kind == "function_call":
            yield {
                "type": "response.function_call_arguments.done",
                **_place(opened),
                "name": opened.called["name"],
                "arguments": text,
            }
            yield from self._done(opened.index, _item(opened, status, []))
            return
        common = {**_place(opened), "content_index": 0}
        part = _part(opened, text, opened.logprobs)
        if opened.kind == "reasoning":
            yield {"type": "response.reasoning_text.done", **common, "text": text}
        else:
            yield {"type": "response.output_text.done", **common, "text": text, "logprobs": opened.logprobs}
        yield {"type": "response.content_part.done", **common, "part": part}
        item = _item(opened, status, [part])
        if signature and self.with_signatures:
            item["encrypted_content"] = signature
        yield from self._done(opened.index, item)

    def empty_message(self) -> Iterator[dict[str, Any]]:
        """Add a message without text because the model did not generate an answer."""
        opened = self._open = self._opened("message")
        yield from self._added(opened)
        yield from self.close()

    def add_calls(self, deltas: Iterable[Delta]) -> Iterator[dict[str, Any]]:
        """Add call pieces. The first piece of a call completes the preceding item."""
        for delta in deltas:
            if "id" in delta:
                yield from self.close()
                called = self.names.get(delta["name"], {"name": delta["name"]})
                self._open = _Open(
                    "function_call", self._item_id("fc"), len(self.items), call_id=delta["id"], called=called
                )
                item = _item(self._open, "in_progress", [])
                yield {"type": "response.output_item.added", "output_index": self._open.index, "item": item}
            opened = self._open
            if opened is not None and self.is_in_call and delta["arguments"]:
                opened.texts.append(delta["arguments"])
                yield {"type": "response.function_call_arguments.delta", **_place(opened), "delta": delta["arguments"]}

    @property
    def has_answer(self) -> bool:
        return any(item["type"] != "reasoning" for item in self.items)

    @property
    def is_in_call(self) -> bool:
        """Return whether the open item is a call."""
        return self._open is not None and self._open.kind == "function_call"

    def _opened(self, kind: str) -> _Open:
        return _Open(kind, self._item_id("rs" if kind == "reasoning" else "msg"), len(self.items))

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self.response_id}_{len(self.items)}"

    def _added(self, opened: _Open) -> Iterator[dict[str, Any]]:
        common = {**_place(opened), "content_index": 0}
        item = _item(opened, "in_progress", [])
        yield {"type": "response.output_item.added", "output_index": opened.index, "item": item}
        yield {"type": "response.content_part.added", **common, "part": _part(opened, "", [])}

    def _done(self, index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.items.append(item)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _place(opened: _Open) -> dict[str, Any]:
    return {"item_id": opened.item_id, "output_index": opened.index}


def _item(opened: _Open, status: str, content: list[Any]) -> dict[str, Any]:
    if opened.kind == "function_call":
        return {
            "id": opened.item_id,
            "type": "function_call",
            "status": status,
            "call_id": opened.call_id,
            **opened.called,
            "arguments": "".join(opened.texts),
        }
    common = {"id": opened.item_id, "type": opened.kind, "status": status, "content": content}
    return {**common, "summary": []} if opened.kind == "reasoning" else {**common, "role": "assistant"}


def _part(opened: _Open, text: str, logprobs: list[Any]) -> dict[str, Any]:
    if opened.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
