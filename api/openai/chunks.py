"""Convert a job's events into OpenAI stream chunks."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .answers import chat_logprobs, finish_reason_of, text_logprobs, usage_of, warnings_of
from .call_progress import CallProgress, Delta

_REASONING = ("reasoning", "reasoning_end")


def reasoning_tokens_of(event: Mapping[str, Any]) -> int:
    """Return the number of reasoning tokens in an event."""
    return len(event["tokens"]) if event["type"] in _REASONING else 0


@dataclass
class Chunks:
    """Creates the chunks of one answer, which has one job per prompt with `n` choices each.

    The members in `common` are added to each chunk.
    """

    kind: str  # chat or generate
    answer_id: str
    model: str
    n: int = 1
    include_usage: bool = False
    common: Mapping[str, Any] = field(default_factory=dict)
    reasoning_tokens: int = 0
    usages: list[Mapping[str, Any]] = field(default_factory=list)
    _created: int = field(default_factory=lambda: int(time.time()))
    _length: dict[int, int] = field(default_factory=dict)  # choice → characters sent so far
    _calls: defaultdict[int, CallProgress] = field(default_factory=lambda: defaultdict(CallProgress))  # by choice

    def of(self, job_index: int, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the chunks for an event of the job with this index. The event must not be the job's last event."""
        if event["type"] == "started":
            self.model = event["model"]
            return [chunk for index in range(self.n) for chunk in self._first(job_index * self.n + index)]
        if event["type"] not in ("token", *_REASONING):
            return []
        self.reasoning_tokens += reasoning_tokens_of(event)
        index = job_index * self.n + event.get("index", 0)
        entries = event.get("logprobs")
        text = event["text"] if event["type"] != "reasoning_end" else ""
        calls = list(map(_call_delta, self._calls[index].of(event)))
        if not text and not entries and not calls:
            return []
        first = self._first(index)
        if self.kind != "chat":
            logprobs = None if entries is None else text_logprobs(entries, self._length[index])
            self._length[index] += len(text)
            return [*first, self._chunk({"index": index, "text": text, "logprobs": logprobs, "finish_reason": None})]
        delta: dict[str, Any] = (
            {"reasoning_content" if event["type"] in _REASONING else "content": text} if text else {}
        )
        if calls:
            delta["tool_calls"] = calls
        return [*first, self._delta(index, delta, logprobs=None if entries is None else chat_logprobs(entries))]

    def ends(
        self, job_index: int, done: Mapping[str, Any], choices: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the chunks for a job's last event.

        `choices` contains the choices in the job's result, if there are several.
        """
        self.usages.append(done["usage"])
        if choices:
            ends = [(c["finish_reason"], c.get("message", {}).get("tool_calls")) for c in choices]
        else:
            ends = [(done["finish_reason"], done.get("tool_calls"))]
        made: list[dict[str, Any]] = []
        for number, (reason, calls) in enumerate(ends):
            index = job_index * self.n + number
            made += self._first(index)
            if self.kind != "chat":
                end = {"index": index, "text": "", "logprobs": None, "finish_reason": finish_reason_of(reason, None)}
                made.append(self._chunk(end))
                continue
            tool_calls = list(map(_call_delta, self._calls[index].rest(calls or ())))
            if tool_calls:
                made.append(self._delta(index, {"tool_calls": tool_calls}))
            made.append(self._delta(index, {}, finish_reason_of(reason, calls)))
        made[-1] |= warnings_of([done])
        return made

    def usage(self) -> list[dict[str, Any]]:
        """Return the final chunk with the usage if the request asks for the usage."""
        if not self.include_usage:
            return []
        return [{**self._chunk(), "usage": usage_of(self.usages, self.reasoning_tokens)}]

    def _first(self, index: int) -> list[dict[str, Any]]:
        """Return a choice's first chunk, unless it was already returned."""
        if index in self._length:
            return []
        self._length[index] = 0
        return (
            [self._delta(index, {"role": "assistant", "content": "", "refusal": None})] if self.kind == "chat" else []
        )

    def _delta(
        self, index: int, delta: Mapping[str, Any], finish_reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        return self._chunk({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason})

    def _chunk(self, *choices: Mapping[str, Any]) -> dict[str, Any]:
        chunk = {
            "id": self.answer_id,
            "object": "chat.completion.chunk" if self.kind == "chat" else "text_completion",
            "created": self._created,
            "model": self.model,
            **self.common,
            "choices": list(choices),
        }
        return {**chunk, "usage": None} if self.include_usage else chunk


def _call_delta(delta: Delta) -> dict[str, Any]:
    """Return a call piece in OpenAI's format. The first piece includes the call's id, type and name."""
    call: dict[str, Any] = {"index": delta["index"], "function": {"arguments": delta["arguments"]}}
    if "id" in delta:
        call |= {"id": delta["id"], "type": "function"}
        call["function"] = {"name": delta["name"], "arguments": delta["arguments"]}
    return call
