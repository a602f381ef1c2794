"""Reads a reply in channels, as it comes: thoughts, text and tool calls told apart (formats/channels.py). Pure.

    HEAD ── <|message|> ──► BODY ── <|end|> ──► HEAD …

A reply that does not begin with a head is text.
"""

from __future__ import annotations

from .detokenizer import possible_marker
from .formats.calls import NoCalls, ToolCall, call_of, value_at
from .formats.channels import CHANNEL, ENDS, MESSAGE, START, MessageHead, head_of, may_be_head, next_mark
from .reply_format import Kind, ReplyFormat, ReplyPart

_BORDERS = (*ENDS, START, CHANNEL)
_LONGEST = max(map(len, _BORDERS))
_SPACE = "\n\n"  # between two messages of one kind


class ChannelReader:
    """Reads one reply. Owned by its sequence. Calls as of ReplyReader."""

    def __init__(self, format_: ReplyFormat) -> None:
        self._format = format_
        self._visible = dict(format_.visible)
        self._held = ""
        self._raw = ""  # of a message that may turn out to be no call
        self._head: MessageHead | None = None
        self._calls: list[ToolCall] = []
        self._told: set[Kind] = set()  # kinds of which there was some text
        self._num_seen = 0  # characters at the beginning of what is held in which no message ends
        self._fresh = True  # nothing of the present message was told
        self._thinks = False  # thoughts were told, and not yet their end
        self._num_tokens = self._num_thinking = 0
        self._num_unbound: int | None = 0 if format_.bound_at_start else None

    @property
    def is_thinking(self) -> bool:
        """True inside a message of thoughts."""
        return self._head is not None and self._kind == "reasoning"

    @property
    def num_unbound(self) -> int | None:
        """Tokens before those that a grammar binds: those before the text; None while it has not begun."""
        return self._num_unbound

    @property
    def forced_token(self) -> int | None:
        """The token that has to come next because thinking is over its budget."""
        return self._format.closing_token(self._num_thinking) if self.is_thinking else None

    def note_token(self) -> None:
        """One more token was sampled; its text comes with the next `push`."""
        self._num_tokens += 1
        self._num_thinking += self.is_thinking

    def text_of(self, token: int) -> bytes | None:
        """The text of a control token that belongs to the markup; None for all others."""
        return self._visible.get(token)

    def push(self, text: str) -> list[ReplyPart]:
        """Takes released text; returns what is final of it now, possibly nothing."""
        self._held += text
        parts: list[ReplyPart] = []
        while self._read_head(parts) if self._head is None else self._read_body(parts):
            pass
        return parts

    def finish(self, *, cut: bool = False) -> tuple[list[ReplyPart], tuple[ToolCall, ...]]:
        """Ends the reply: what was held back, and the tool calls in it. Markup that means nothing becomes text.

        `cut` if the model would have written more.
        """
        parts: list[ReplyPart] = []
        cut = cut and self._format.has_bound_calls
        if self._head is None:
            self._tell(parts, "text", "" if cut else self._held)
        elif cut and self._function is not None and self._call(self._held) is None:
            self._calls.append(ToolCall(self._function, self._held.lstrip(), is_partial=True))
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
        """True if there is one; False if there may be one when more has come."""
        head, found, rest = self._held.partition(MESSAGE)
        if not may_be_head(self._held):
            self._begin(parts, MessageHead("final"), "", self._held)
        elif found:
            self._begin(parts, head_of(head), head + found, rest)
        return self._head is not None

    def _begin(self, parts: list[ReplyPart], head: MessageHead, raw: str, rest: str) -> None:
        self._head, self._raw, self._held, self._fresh = head, raw, rest, True
        if self._kind == "text":
            self._end_thoughts(parts)
            if self._format.tools is not None and head.function is not None and self._function is None:
                self._tell(parts, "text", raw)  # a call of a tool that was not offered is text
            if head.function is None and head.channel == "final" and self._num_unbound is None:
                self._num_unbound = self._num_tokens

    def _read_body(self, parts: list[ReplyPart]) -> bool:
        """True if the message has ended."""
        border = next_mark(self._held, _BORDERS, self._num_seen)
        while border is not None and self._function is not None and self._call(self._held[: border[0]]) is None:
            border = next_mark(self._held, _BORDERS, border[0] + 1)  # that one was within the arguments
        if border is None:
            self._num_seen = max(0, len(self._held) - _LONGEST)
            if self._function is None:
                length = len(self._held) - possible_marker(self._held, _BORDERS)
                self._tell(parts, self._kind, self._held[:length])
                self._held, self._num_seen = self._held[length:], 0
            return False
        at, mark = border
        self._num_seen = 0
        body, self._held = self._held[:at], self._held[at + len(mark) if mark in ENDS else at :]
        self._end_message(parts, body)
        return True

    @property
    def _function(self) -> str | None:
        """The offered tool that the present message calls."""
        tools, name = self._format.tools, self._head.function if self._head is not None else None
        return name if tools is not None and name is not None and tools.offers(name) else None

    def _end_message(self, parts: list[ReplyPart], body: str) -> None:
        call = self._call(body)
        if call is not None:
            self._calls.append(call)
        else:
            self._tell(parts, self._kind, (self._raw if self._function is not None else "") + body)
        self._head = None

    def _call(self, body: str) -> ToolCall | None:
        """What a message with this text calls, if it is whole."""
        if self._function is None:
            return None
        try:
            arguments, end = value_at(body, 0)
            return None if body[end:].strip() else call_of(self._function, arguments)
        except (NoCalls, RecursionError):
            return None

    def _end_thoughts(self, parts: list[ReplyPart]) -> None:
        if self._thinks:
            parts.append(ReplyPart("reasoning_end"))
            self._thinks = False

    def _tell(self, parts: list[ReplyPart], kind: Kind, text: str) -> None:
        if not text:
            return
        space = _SPACE if self._fresh and kind in self._told else ""
        parts.append(ReplyPart(kind, space + text))
        self._told.add(kind)
        self._fresh = False
        self._thinks = self._thinks or kind == "reasoning"
