"""Track a reply's tool calls from its job's events, for streams that send calls in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Delta = Mapping[str, Any]  # a ToolCallDelta of an event


class CallProgress:
    """The tool calls that a stream has sent so far, with their arguments."""

    def __init__(self) -> None:
        self._sent: dict[int, str] = {}

    def of(self, event: Mapping[str, Any]) -> Iterator[Delta]:
        """Yield the call pieces in an event.

        Pieces of a call are dropped if the call's first piece is missing. The first piece is missing if an older worker
        wrote the start of the call without pieces. In this case, the whole call is sent at the end.
        """
        for delta in event.get("tool_call_deltas", ()):
            if "id" not in delta and delta["index"] not in self._sent:
                continue
            self._sent[delta["index"]] = self._sent.get(delta["index"], "") + delta["arguments"]
            yield delta

    def rest(self, calls: Iterable[Mapping[str, Any]]) -> Iterator[Delta]:
        """Yield the missing parts of the finished calls: whole calls, or the ends of partly sent calls.

        Calls that are not enforced by a grammar are known only at the end. Events from older workers don't contain any
        pieces.
        """
        for number, call in enumerate(calls):
            arguments, sent = call["function"]["arguments"], self._sent.get(number)
            if sent is None:
                yield {"index": number, "id": call["id"], "name": call["function"]["name"], "arguments": arguments}
            elif len(arguments) > len(sent):
                yield {"index": number, "arguments": arguments[len(sent) :]}
