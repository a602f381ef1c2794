"""The items of an answer as they grow, and the typed events that tell of it. Without numbers: `events` gives those."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cellama.api.openai.logprobs import of_chat

Told = Iterator[dict[str, Any]]


@dataclass(slots=True)
class _Open:
    """The item that grows: thoughts, or a text."""

    kind: str  # reasoning or message
    item_id: str
    place: int  # among the items
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class OutputItems:
    """Items that are complete, and the one that is not. `own_id` is what ids of items are made of."""

    own_id: str
    with_logprobs: bool = False
    with_signatures: bool = False
    items: list[dict[str, Any]] = field(default_factory=list)
    _open: _Open | None = None

    def add(self, kind: str, text: str, entries: Sequence[Mapping[str, Any]]) -> Told:
        """More thoughts, or more text. What was open of the other kind is complete."""
        if not text and not entries:
            return
        if self._open is not None and self._open.kind != kind:
            yield from self.close()
        opened = self._open
        if opened is None:
            opened = self._open = self._opened(kind)
            yield from self._added(opened)
        opened.texts.append(text)
        own = {"item_id": opened.item_id, "output_index": opened.place, "content_index": 0, "delta": text}
        if kind == "reasoning":
            yield {"type": "response.reasoning_text.delta", **own}
            return
        shown = of_chat(entries)["content"] if self.with_logprobs else []
        opened.logprobs += shown
        yield {"type": "response.output_text.delta", **own, "logprobs": shown}

    def close(self, *, is_whole: bool = True, signature: str = "") -> Told:
        """What is open is complete, or cut off."""
        if (opened := self._open) is None:
            return
        self._open = None
        text, status = "".join(opened.texts), "completed" if is_whole else "incomplete"
        own = {"item_id": opened.item_id, "output_index": opened.place, "content_index": 0}
        part = _part(opened, text, opened.logprobs if self.with_logprobs else None)
        if opened.kind == "reasoning":
            yield {"type": "response.reasoning_text.done", **own, "text": text}
        else:
            yield {"type": "response.output_text.done", **own, "text": text, "logprobs": opened.logprobs}
        yield {"type": "response.content_part.done", **own, "part": part}
        item = _item(opened, status, [part])
        if signature and self.with_signatures:
            item["encrypted_content"] = signature
        yield from self._done(opened.place, item)

    def empty_message(self) -> Told:
        """The model has answered with nothing."""
        opened = self._open = self._opened("message")
        yield from self._added(opened)
        yield from self.close()

    def call(self, call: Mapping[str, Any]) -> Told:
        """A call of a tool, all at once: what comes before its end may yet turn out to be text."""
        place, function = len(self.items), call["function"]
        status = "incomplete" if call.get("partial") else "completed"
        item_id = f"fc_{self.own_id}_{place}"
        item = {
            "id": item_id,
            "type": "function_call",
            "status": status,
            "call_id": call["id"],
            "name": function["name"],
            "arguments": function["arguments"],
        }
        own = {"item_id": item_id, "output_index": place}
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield {"type": "response.output_item.added", "output_index": place, "item": begun}
        yield {"type": "response.function_call_arguments.delta", **own, "delta": item["arguments"]}
        yield {
            "type": "response.function_call_arguments.done",
            **own,
            "name": item["name"],
            "arguments": item["arguments"],
        }
        yield from self._done(place, item)

    @property
    def has_answer(self) -> bool:
        return any(item["type"] != "reasoning" for item in self.items)

    def _opened(self, kind: str) -> _Open:
        place = len(self.items)
        return _Open(kind, f"{'rs' if kind == 'reasoning' else 'msg'}_{self.own_id}_{place}", place)

    def _added(self, opened: _Open) -> Told:
        own = {"item_id": opened.item_id, "output_index": opened.place, "content_index": 0}
        item = _item(opened, "in_progress", [])
        yield {"type": "response.output_item.added", "output_index": opened.place, "item": item}
        yield {"type": "response.content_part.added", **own, "part": _part(opened, "", None)}

    def _done(self, place: int, item: dict[str, Any]) -> Told:
        self.items.append(item)
        yield {"type": "response.output_item.done", "output_index": place, "item": item}


def _item(opened: _Open, status: str, content: list[Any]) -> dict[str, Any]:
    own = {"id": opened.item_id, "type": opened.kind, "status": status, "content": content}
    return {**own, "summary": []} if opened.kind == "reasoning" else {**own, "role": "assistant"}


def _part(opened: _Open, text: str, logprobs: list[Any] | None) -> dict[str, Any]:
    if opened.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    shown = {} if logprobs is None else {"logprobs": logprobs}
    return {"type": "output_text", "text": text, "annotations": [], **shown}
