"""Separate the reasoning, text and tool calls of a reply while the model generates it.

The readers change only what callers see. Sampled tokens, usage and the KV cache stay the same. The parts of a reply do
not depend on how its text is split into pieces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from .detokenizer import partial_marker_length
from .formats.arguments_stream import JsonArguments
from .formats.call_reader import ToolReader
from .formats.call_stream import CallPieces, CallStream
from .formats.calls import CallDelta, NoCalls, ParsedToolCall, call_of, value_at
from .formats.channels import CHANNEL, ENDS, MESSAGE, START, MessageHead, head_of, may_be_head, next_mark

Kind = Literal["text", "reasoning", "reasoning_end"]


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """A piece of a reply that can no longer change. `text` is empty for `reasoning_end`.

    `calls` are pieces of tool calls, which follow the text. Before the end of the reply, only calls that a grammar
    enforces are returned, because other calls may still turn out to be text.
    """

    kind: Kind
    text: str = ""
    calls: tuple[CallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """The markup of a reply.

    If the tags are empty, the model does not reason. If `tools` is None, tool calls are not parsed.
    """

    think_open: str = ""
    think_close: str = ""
    starts_thinking: bool = False  # whether the prompt ends with `think_open`
    thinking_budget: int | None = None  # reasoning tokens, after which `think_close` is forced
    close_tokens: tuple[int, ...] = ()  # the tokens of `think_close`
    tools: ToolReader | None = None
    channels: bool = False  # reasoning, text and calls are messages in channels (formats/channels.py)
    bound_at_start: bool = False  # channels only: a grammar constrains the whole reply instead of only its text
    has_bound_calls: bool = False  # a grammar enforces well-formed calls, so text that starts like a call is a call
    is_call: bool = False  # the reply consists of calls only
    visible: tuple[tuple[int, bytes], ...] = ()  # control tokens that are part of the markup, with their text

    def closing_token(self, num_reasoning: int) -> int | None:
        """Return the token that must be sampled next if `num_reasoning` tokens use up the budget, or None otherwise."""
        if self.thinking_budget is None or num_reasoning < self.thinking_budget:
            return None
        return self.close_tokens[(num_reasoning - self.thinking_budget) % len(self.close_tokens)]


def open_reply(format_: ReplyFormat) -> ReplyReader:
    """Return a reader for one reply in this format."""
    return ChannelReader(format_) if format_.channels else TagReader(format_)


class ReplyReader(ABC):
    """Reads one reply. The sequence that generates the reply owns the reader."""

    def __init__(self, format_: ReplyFormat) -> None:
        self._format = format_
        self._held = ""  # text that may still turn out to be markup
        self._visible = dict(format_.visible)
        self._num_tokens = 0
        self._num_reasoning = 0

    @property
    @abstractmethod
    def is_thinking(self) -> bool:
        """True while the model is reasoning."""

    @property
    @abstractmethod
    def num_unbound(self) -> int | None:
        """The number of leading tokens that are not constrained by a grammar, or None while this number is unknown."""

    @property
    def forced_token(self) -> int | None:
        """The token that must be sampled next because the reasoning budget is used up, or None."""
        return self._format.closing_token(self._num_reasoning) if self.is_thinking else None

    def note_token(self) -> None:
        """Count one sampled token. Pass the token's text to the next `push` call."""
        self._num_tokens += 1
        self._num_reasoning += self.is_thinking

    def text_of(self, token: int) -> bytes | None:
        """Return the text of a control token that is part of the markup, or None for any other token."""
        return self._visible.get(token)

    def push(self, text: str) -> list[ReplyPart]:
        """Add text to the reply, and return the parts that are now final."""
        return self._with_pieces(self._push(text))

    def finish(self, *, cut: bool = False) -> tuple[list[ReplyPart], tuple[ParsedToolCall, ...]]:
        """End the reply, and return the remaining parts and the tool calls. Incomplete markup becomes text.

        Set `cut` if the model had not finished, for instance because max_tokens was reached.
        """
        parts, calls = self._finish(cut=cut and self._format.has_bound_calls)
        return self._with_pieces(parts), calls

    @property
    @abstractmethod
    def _pieces(self) -> CallPieces | None:
        """The pieces of the calls so far, or None before the first call or if no grammar enforces the calls."""

    @abstractmethod
    def _push(self, text: str) -> list[ReplyPart]:
        """Add text, and return the final parts of the reply, without pieces of calls."""

    @abstractmethod
    def _finish(self, *, cut: bool) -> tuple[list[ReplyPart], tuple[ParsedToolCall, ...]]:
        """End the reply. `cut` is only true if a grammar enforces calls."""

    def _with_pieces(self, parts: list[ReplyPart]) -> list[ReplyPart]:
        """Attach the new pieces of calls to the last part.

        A part and its pieces become a single event, because the tokens of an event must account for all of its text.
        """
        new = () if self._pieces is None else self._pieces.take()
        if not new:
            return parts
        if parts and parts[-1].kind == "text":
            return [*parts[:-1], replace(parts[-1], calls=new)]
        return [*parts, ReplyPart("text", calls=new)]


class _State(Enum):
    START = "start"
    THINKING = "thinking"
    TEXT = "text"
    CALLS = "calls"


class TagReader(ReplyReader):
    """Reads replies whose reasoning and tool calls are between tags.

    START ── reasoning opens ──► THINKING ── reasoning closes ──► TEXT ── a tool call opens ──► CALLS
      └── anything else ─────────────────────────────────────────►┘
    """

    def __init__(self, format_: ReplyFormat) -> None:
        super().__init__(format_)
        self._state = _State.THINKING if format_.starts_thinking else _State.START
        self._drops_space = format_.starts_thinking  # true at the start of reasoning, and of the text after it
        self._has_text = False
        self._calls: CallStream | None = None

    @property
    def _pieces(self) -> CallPieces | None:
        return None if self._calls is None else self._calls.pieces

    @property
    def is_thinking(self) -> bool:
        """True while a block of reasoning is open."""
        return self._state is _State.THINKING

    @property
    def num_unbound(self) -> int | None:
        """The number of reasoning tokens in a block that the prompt opened, or None while the block is open.

        The number is 0 if the model opens the block itself, because a grammar then constrains the reply from the start.
        """
        if not self._format.starts_thinking:
            return 0
        return None if self.is_thinking else self._num_reasoning

    def _push(self, text: str) -> list[ReplyPart]:
        self._held += text
        parts: list[ReplyPart] = []
        while (next_state := self._advance(parts)) is not self._state:
            self._state = next_state
        return parts

    def _finish(self, *, cut: bool) -> tuple[list[ReplyPart], tuple[ParsedToolCall, ...]]:
        calls: tuple[ParsedToolCall, ...] = ()
        parts: list[ReplyPart] = []
        if self._state is _State.THINKING:
            self._release(parts, "reasoning", self._held.rstrip())
        else:
            if self._calls is not None:
                calls, self._held = self._calls.finish(cut=cut)
            elif self._state is _State.CALLS and self._format.tools is not None:
                calls, self._held = self._format.tools.parse(self._held)
            elif cut and self._format.is_call:  # the held text is the start of a call
                self._held = ""
            self._release(parts, "text", self._held)
        self._held = ""
        return parts, calls

    def _advance(self, parts: list[ReplyPart]) -> _State:
        """Release the text that is final in the current state, and return the next state."""
        match self._state:
            case _State.START:
                return self._read_start()
            case _State.THINKING:
                return self._read_reasoning(parts)
            case _State.TEXT:
                return self._read_text(parts)
            case _State.CALLS:
                return self._read_calls()

    def _read_start(self) -> _State:
        """Return the state after the start of the reply.

        Reasoning tags that occur later in the reply are ordinary text.
        """
        opening, start = self._format.think_open, self._held.lstrip()
        if opening and start.startswith(opening):
            self._held, self._drops_space = start[len(opening) :], True
            return _State.THINKING
        return _State.START if opening.startswith(start) and opening else _State.TEXT

    def _read_reasoning(self, parts: list[ReplyPart]) -> _State:
        closing = self._format.think_close
        reasoning, closed, rest = self._held.partition(closing)
        if closed:
            self._release(parts, "reasoning", reasoning.rstrip())
            parts.append(ReplyPart("reasoning_end"))
            self._held, self._drops_space = rest, True
            return _State.TEXT
        self._release_all_but(partial_marker_length(reasoning, (closing,)), parts, "reasoning")
        return _State.THINKING

    def _read_text(self, parts: list[ReplyPart]) -> _State:
        tools = self._format.tools
        if tools is None:
            self._release_all_but(0, parts, "text", keeps_space=True)
            return _State.TEXT
        at = tools.find(self._held, at_start=not self._has_text)
        if at is None:
            self._release_all_but(partial_marker_length(self._held, tools.format.markers), parts, "text")
            return _State.TEXT
        self._release_all_but(len(self._held) - at, parts, "text")
        return _State.CALLS

    def _read_calls(self) -> _State:
        """Read enforced calls immediately. Other calls are parsed at the end, because they may turn out to be text."""
        if self._format.has_bound_calls and self._format.tools is not None:
            if self._calls is None:
                self._calls = CallStream(self._format.tools)
            self._calls.push(self._held)
            self._held = ""
        return _State.CALLS

    def _release_all_but(self, num_held: int, parts: list[ReplyPart], kind: Kind, *, keeps_space: bool = False) -> None:
        """Release all text except the last characters and the whitespace before them, which may belong to a tag."""
        text = self._held[: len(self._held) - num_held]
        text = text if keeps_space else text.rstrip()
        self._held = self._held[len(text) :]
        self._release(parts, kind, text)

    def _release(self, parts: list[ReplyPart], kind: Kind, text: str) -> None:
        text = text.lstrip() if self._drops_space else text
        if text:
            self._drops_space = False
            self._has_text = self._has_text or kind == "text"
            parts.append(ReplyPart(kind, text))


_BORDERS = (*ENDS, START, CHANNEL)
_MAX_BORDER_CHARS = max(map(len, _BORDERS))
_MESSAGE_SEPARATOR = "\n\n"  # between two messages of the same kind


class ChannelReader(ReplyReader):
    """Reads replies whose parts are messages in channels (formats/channels.py).

        HEAD ── <|message|> ──► BODY ── <|end|> ──► HEAD …

    A reply that does not start with a message header consists only of text.
    """

    def __init__(self, format_: ReplyFormat) -> None:
        super().__init__(format_)
        self._head: MessageHead | None = None  # None: the header of the next message is not complete
        self._raw_head = ""  # released as text if the message turns out not to be a call
        self._calls: list[ParsedToolCall] = []  # calls that no grammar enforces
        self._enforced = CallPieces(format_.tools is not None and format_.tools.only_one)
        self._arguments: JsonArguments | None = None  # of an enforced call
        self._released_kinds: set[Kind] = set()
        self._num_searched = 0  # leading characters of the held text in which no message ends
        self._is_message_start = True  # no text of the current message was released
        self._has_open_reasoning = False  # reasoning was released, but its end was not
        self._num_unbound: int | None = 0 if format_.bound_at_start else None

    @property
    def is_thinking(self) -> bool:
        """True if the current message is reasoning."""
        return self._head is not None and self._kind == "reasoning"

    @property
    def num_unbound(self) -> int | None:
        """The number of tokens before the text, which no grammar constrains, or None until the text starts."""
        return self._num_unbound

    @property
    def _pieces(self) -> CallPieces | None:
        return self._enforced

    def _push(self, text: str) -> list[ReplyPart]:
        self._held += text
        parts: list[ReplyPart] = []
        while self._read_head(parts) if self._head is None else self._read_body(parts):
            pass
        return parts

    def _finish(self, *, cut: bool) -> tuple[list[ReplyPart], tuple[ParsedToolCall, ...]]:
        parts: list[ReplyPart] = []
        if self._head is None:
            self._release(parts, "text", "" if cut else self._held)
        elif self._arguments is not None:
            if not self._arguments.is_complete:
                self._enforced.cut(self._arguments.cut(self._held))
        else:
            self._end_message(parts, self._held)
        self._held = ""
        only_one = self._format.tools is not None and self._format.tools.only_one
        return parts, self._enforced.calls() or tuple(self._calls[:1] if only_one else self._calls)

    @property
    def _kind(self) -> Kind:
        assert self._head is not None
        return "reasoning" if self._head.channel == "analysis" and not self._head.recipient else "text"

    @property
    def _function(self) -> str | None:
        """The offered tool that the current message calls, or None."""
        tools, name = self._format.tools, self._head.function if self._head is not None else None
        return name if tools is not None and name is not None and tools.offers(name) else None

    def _read_head(self, parts: list[ReplyPart]) -> bool:
        """Read the header of a message. Return False if the header is incomplete."""
        head, found, rest = self._held.partition(MESSAGE)
        if not may_be_head(self._held):
            self._start_message(parts, MessageHead("final"), "", self._held)
        elif found:
            self._start_message(parts, head_of(head), head + found, rest)
        return self._head is not None

    def _start_message(self, parts: list[ReplyPart], head: MessageHead, raw_head: str, rest: str) -> None:
        self._head, self._raw_head, self._held, self._is_message_start = head, raw_head, rest, True
        if self._kind == "text":
            if self._has_open_reasoning:
                parts.append(ReplyPart("reasoning_end"))
                self._has_open_reasoning = False
            if self._format.tools is not None and head.function is not None and self._function is None:
                self._release(parts, "text", raw_head)  # a call of a tool that was not offered is text
            if head.function is None and head.channel == "final" and self._num_unbound is None:
                self._num_unbound = self._num_tokens
            if self._function is not None and self._format.has_bound_calls:
                self._arguments = JsonArguments()
                self._enforced.start(self._function)

    def _read_enforced_call(self, arguments: JsonArguments) -> bool:
        """Read the arguments of an enforced call. Return True if the call's message has ended."""
        new, length = arguments.read(self._held)
        self._enforced.add(new)
        self._held = self._held[length:]
        border = next_mark(self._held, _BORDERS) if arguments.is_complete else None
        if border is None:
            return False
        at, mark = border
        self._held = self._held[at + len(mark) if mark in ENDS else at :]
        self._arguments = self._head = None
        return True

    def _read_body(self, parts: list[ReplyPart]) -> bool:
        """Read the body of a message. Return True if the message has ended."""
        if self._arguments is not None:
            return self._read_enforced_call(self._arguments)
        border = next_mark(self._held, _BORDERS, self._num_searched)
        while border is not None and self._function is not None and self._call(self._held[: border[0]]) is None:
            border = next_mark(self._held, _BORDERS, border[0] + 1)  # the border was within the arguments
        if border is None:
            self._num_searched = max(0, len(self._held) - _MAX_BORDER_CHARS)
            if self._function is None:
                length = len(self._held) - partial_marker_length(self._held, _BORDERS)
                self._release(parts, self._kind, self._held[:length])
                self._held, self._num_searched = self._held[length:], 0
            return False
        at, mark = border
        self._num_searched = 0
        body, self._held = self._held[:at], self._held[at + len(mark) if mark in ENDS else at :]
        self._end_message(parts, body)
        return True

    def _end_message(self, parts: list[ReplyPart], body: str) -> None:
        call = self._call(body)
        if call is not None:
            self._calls.append(call)
        else:
            self._release(parts, self._kind, (self._raw_head if self._function is not None else "") + body)
        self._head = None

    def _call(self, body: str) -> ParsedToolCall | None:
        """Return the call that a message with this body makes, or None if the body is incomplete or isn't a call."""
        if self._function is None:
            return None
        try:
            arguments, end = value_at(body, 0)
            return None if body[end:].strip() else call_of(self._function, arguments)
        except (NoCalls, RecursionError):
            return None

    def _release(self, parts: list[ReplyPart], kind: Kind, text: str) -> None:
        if not text:
            return
        separator = _MESSAGE_SEPARATOR if self._is_message_start and kind in self._released_kinds else ""
        parts.append(ReplyPart(kind, separator + text))
        self._released_kinds.add(kind)
        self._is_message_start = False
        self._has_open_reasoning = self._has_open_reasoning or kind == "reasoning"
