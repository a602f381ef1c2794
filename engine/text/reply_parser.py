"""Reads a chat model's output as it comes, and separates reasoning, text and tool calls. Pure.

    START ── thinks ──► THINKING ── closed ──► TEXT ── a tool call opens ──► CALLS
      └── does not think ────────────────────►┘

Only what is shown differs from what was generated: tokens, usage and the cache are unaffected. The parts don't depend
on how the text is split.
"""

from __future__ import annotations

from enum import Enum

from .detokenizer import possible_marker
from .formats.calls import ParsedToolCall
from .reply_format import Kind, ReplyFormat, ReplyPart


class _State(Enum):
    START = "start"
    THINKING = "thinking"
    TEXT = "text"
    CALLS = "calls"


class ReplyReader:
    """Reads one reply. Owned by its sequence."""

    def __init__(self, format_: ReplyFormat) -> None:
        self._format = format_
        self._state = _State.THINKING if format_.starts_thinking else _State.START
        self._held = ""
        self._drops_space = format_.starts_thinking  # at the start of reasoning, and of the text after it
        self._answered = False  # some text has been released
        self._visible = dict(format_.visible)
        self._num_thinking = 0

    @property
    def is_thinking(self) -> bool:
        """Whether a block of reasoning is open."""
        return self._state is _State.THINKING

    @property
    def num_unbound(self) -> int | None:
        """The number of reasoning tokens in a block that the template opened, which no grammar binds.

        None while the block is open. A model that opens a block itself is bound from the start.
        """
        if not self._format.starts_thinking:
            return 0
        return None if self.is_thinking else self._num_thinking

    @property
    def forced_token(self) -> int | None:
        """The token that must come next because the reasoning exceeds its budget."""
        return self._format.closing_token(self._num_thinking) if self.is_thinking else None

    def note_token(self) -> None:
        """Count one more sampled token; its text comes with the next `push`."""
        self._num_thinking += self.is_thinking

    def text_of(self, token: int) -> bytes | None:
        """Return the text of a control token that belongs to the markup; None for all others."""
        return self._visible.get(token)

    def push(self, text: str) -> list[ReplyPart]:
        """Take released text, and return the parts that are final now."""
        self._held += text
        parts: list[ReplyPart] = []
        while (following := self._advance(parts)) is not self._state:
            self._state = following
        return parts

    def finish(self, *, cut: bool = False) -> tuple[list[ReplyPart], tuple[ParsedToolCall, ...]]:
        """End the reply, and return the parts that were held back and the tool calls. Other markup becomes text.

        `cut` says that the model would have written more.
        """
        cut = cut and self._format.has_bound_calls
        calls: tuple[ParsedToolCall, ...] = ()
        parts: list[ReplyPart] = []
        if self._state is _State.THINKING:
            self._release(parts, "reasoning", self._held.rstrip())
        else:
            if self._state is _State.CALLS and self._format.tools is not None:
                calls, self._held = self._format.tools.parse(self._held, cut=cut)
            elif cut and self._format.is_call:  # what is held is the start of a call
                self._held = ""
            self._release(parts, "text", self._held)
        self._held = ""
        return parts, calls

    def _advance(self, parts: list[ReplyPart]) -> _State:
        """Release what the current state allows, and return the state that follows."""
        match self._state:
            case _State.START:
                return self._begin()
            case _State.THINKING:
                return self._think(parts)
            case _State.TEXT:
                return self._answer(parts)
            case _State.CALLS:
                return _State.CALLS

    def _begin(self) -> _State:
        """Reasoning can only be the first thing in a reply; later tags are text."""
        opening, seen = self._format.think_open, self._held.lstrip()
        if opening and seen.startswith(opening):
            self._held, self._drops_space = seen[len(opening) :], True
            return _State.THINKING
        return _State.START if opening.startswith(seen) and opening else _State.TEXT

    def _think(self, parts: list[ReplyPart]) -> _State:
        closing = self._format.think_close
        thought, closed, rest = self._held.partition(closing)
        if closed:
            self._release(parts, "reasoning", thought.rstrip())
            parts.append(ReplyPart("reasoning_end"))
            self._held, self._drops_space = rest, True
            return _State.TEXT
        self._release_up_to(parts, "reasoning", possible_marker(thought, (closing,)))
        return _State.THINKING

    def _answer(self, parts: list[ReplyPart]) -> _State:
        tools = self._format.tools
        if tools is None:
            self._release_up_to(parts, "text", 0, keeps_space=True)
            return _State.TEXT
        at = tools.find(self._held, at_start=not self._answered)
        if at is None:
            self._release_up_to(parts, "text", possible_marker(self._held, tools.format.markers))
            return _State.TEXT
        self._release_up_to(parts, "text", len(self._held) - at)
        return _State.CALLS

    def _release_up_to(self, parts: list[ReplyPart], kind: Kind, num_held: int, *, keeps_space: bool = False) -> None:
        """Release all except the last characters, and the space before them, which may belong to a tag."""
        text = self._held[: len(self._held) - num_held]
        text = text if keeps_space else text.rstrip()
        self._held = self._held[len(text) :]
        self._release(parts, kind, text)

    def _release(self, parts: list[ReplyPart], kind: Kind, text: str) -> None:
        text = text.lstrip() if self._drops_space else text
        if text:
            self._drops_space = False
            self._answered = self._answered or kind == "text"
            parts.append(ReplyPart(kind, text))
