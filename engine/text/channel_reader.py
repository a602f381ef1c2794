"""Reads a reply in channels as it comes, and separates reasoning, text and tool calls (formats/channels.py). Pure.

    HEAD ── <|message|> ──► BODY ── <|end|> ──► HEAD …

A reply that does not start with a head is text.
"""

from __future__ import annotations

from .detokenizer import possible_marker
from .formats.calls import NoCalls, ParsedToolCall, call_of, value_at
from .formats.channels import CHANNEL, ENDS, MESSAGE, START, MessageHead, head_of, may_be_head, next_mark
from .reply_format import Kind, ReplyFormat, ReplyPart

_BORDERS = (*ENDS, START, CHANNEL)
_LONGEST = max(map(len, _BORDERS))
_SPACE = "\n\n"  # between two messages of one kind


class ChannelReader:
    """Reads one reply. Owned by its sequence. It has the methods of ReplyReader."""

    def __init__(self, format_: ReplyFormat) -> None:
        self._format = format_
        self._visible = dict(format_.visible)
        self._held = ""
        self._raw = ""  # head of a message that may turn out to be text
        self._head: MessageHead | None = None
        self._calls: list[ParsedToolCall] = []
        self._released: set[Kind] = set()  # kinds of which some text was released
        self._num_seen = 0  # leading characters of what is held in which no message ends
        self._fresh = True  # nothing of the current message was released
        self._thinks = False  # reasoning was released, and its end was not
        self._num_tokens = self._num_thinking = 0
        self._num_unbound: int | None = 0 if format_.bound_at_start else None

    @property
    def is_thinking(self) -> bool:
        """Whether the current message is reasoning."""
        return self._head is not None and self._kind == "reasoning"

    @property
    def num_unbound(self) -> int | None:
        """The number of tokens before the text, which no grammar binds; None before the text starts."""
        return self._num_unbound

    @property
    def forced_token(self) -> int | None:
        """The token that must come next because the reasoning exceeds its budget."""
        return self._format.closing_token(self._num_thinking) if self.is_thinking else None

    def note_token(self) -> None:
        """Count one more sampled token; its text comes with the next `push`."""
        self._num_tokens += 1
        self._num_thinking += self.is_thinking

    def text_of(self, token: int) -> bytes | None:
        """Return the text of a control token that belongs to the markup; None for all others."""
        return self._visible.get(token)

    def push(self, text: str) -> list[ReplyPart]:
        """Take released text, and return the parts that are final now."""
        self._held += text
        parts: list[ReplyPart] = []
        while self._read_head(parts) if self._head is None else self._read_body(parts):
            pass
        return parts

    def finish(self, *, cut: bool = False) -> tuple[list[ReplyPart], tuple[ParsedToolCall, ...]]:
        """End the reply, and return the parts that were held back and the tool calls. Other markup becomes text.

        `cut` says that the model would have written more.
        """
        parts: list[ReplyPart] = []
        cut = cut and self._format.has_bound_calls
        if self._head is None:
            self._release(parts, "text", "" if cut else self._held)
        elif cut and self._function is not None and self._call(self._held) is None:
            self._calls.append(ParsedToolCall(self._function, self._held.lstrip(), is_partial=True))
        else:
            self._end_message(parts, self._held)
        self._held = ""
        only_one = self._format.tools is not None and self._format.tools.only_one
        return parts, tuple(self._calls[:1] if only_one else self._calls)

    @property
    def _kind(self) -> Kind:
        assert self._head is not None
        return "reasoning" if self._head.channel == "analysis" and not self._head.recipient else "text"

    def _read_head(self, parts: list[ReplyPart]) -> bool:
        """Read a head; return False if it is not complete."""
        head, found, rest = self._held.partition(MESSAGE)
        if not may_be_head(self._held):
            self._begin(parts, MessageHead("final"), "", self._held)
        elif found:
            self._begin(parts, head_of(head), head + found, rest)
        return self._head is not None

    def _begin(self, parts: list[ReplyPart], head: MessageHead, raw: str, rest: str) -> None:
        self._head, self._raw, self._held, self._fresh = head, raw, rest, True
        if self._kind == "text":
            self._end_reasoning(parts)
            if self._format.tools is not None and head.function is not None and self._function is None:
                self._release(parts, "text", raw)  # a call of a tool that was not offered is text
            if head.function is None and head.channel == "final" and self._num_unbound is None:
                self._num_unbound = self._num_tokens

    def _read_body(self, parts: list[ReplyPart]) -> bool:
        """Read the body of a message; return whether the message has ended."""
        border = next_mark(self._held, _BORDERS, self._num_seen)
        while border is not None and self._function is not None and self._call(self._held[: border[0]]) is None:
            border = next_mark(self._held, _BORDERS, border[0] + 1)  # this border was within the arguments
        if border is None:
            self._num_seen = max(0, len(self._held) - _LONGEST)
            if self._function is None:
                length = len(self._held) - possible_marker(self._held, _BORDERS)
                self._release(parts, self._kind, self._held[:length])
                self._held, self._num_seen = self._held[length:], 0
            return False
        at, mark = border
        self._num_seen = 0
        body, self._held = self._held[:at], self._held[at + len(mark) if mark in ENDS else at :]
        self._end_message(parts, body)
        return True

    @property
    def _function(self) -> str | None:
        """The offered tool that the current message calls; None if it calls none."""
        tools, name = self._format.tools, self._head.function if self._head is not None else None
        return name if tools is not None and name is not None and tools.offers(name) else None

    def _end_message(self, parts: list[ReplyPart], body: str) -> None:
        call = self._call(body)
        if call is not None:
            self._calls.append(call)
        else:
            self._release(parts, self._kind, (self._raw if self._function is not None else "") + body)
        self._head = None

    def _call(self, body: str) -> ParsedToolCall | None:
        """Return the call of a message with this text; None if it is incomplete or not a call."""
        if self._function is None:
            return None
        try:
            arguments, end = value_at(body, 0)
            return None if body[end:].strip() else call_of(self._function, arguments)
        except (NoCalls, RecursionError):
            return None

    def _end_reasoning(self, parts: list[ReplyPart]) -> None:
        if self._thinks:
            parts.append(ReplyPart("reasoning_end"))
            self._thinks = False

    def _release(self, parts: list[ReplyPart], kind: Kind, text: str) -> None:
        if not text:
            return
        space = _SPACE if self._fresh and kind in self._released else ""
        parts.append(ReplyPart(kind, space + text))
        self._released.add(kind)
        self._fresh = False
        self._thinks = self._thinks or kind == "reasoning"
