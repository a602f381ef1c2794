"""GPT-OSS's way of marking up a reply (harmony): messages, each with a channel, and calls that go to a recipient. Pure.

<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>text<|return|>
<|channel|>commentary to=functions.name <|constrain|>json<|message|>{"x": 1}<|call|>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
ENDS = (END, "<|call|>", "<|return|>")  # of a message
MARKUP = (CHANNEL, MESSAGE, START, "<|constrain|>", *ENDS)
FUNCTIONS = "functions."
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|\s|>)to=([^\s<]+)")
_BEGINNINGS = (CHANNEL, START, MESSAGE, "to=", "assistant")


@dataclass(frozen=True, slots=True)
class MessageHead:
    """The head of a message: its channel, and its recipient."""

    channel: str
    recipient: str = ""

    @property
    def function(self) -> str | None:
        """The function that this message calls; None if it calls none."""
        return self.recipient.removeprefix(FUNCTIONS) if self.recipient.startswith(FUNCTIONS) else None


def head_of(text: str) -> MessageHead:
    """Parse a head without its `<|message|>`."""
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    return MessageHead(channel.group(1) if channel else "final", recipient.group(1) if recipient else "")


def may_be_head(text: str) -> bool:
    """Return whether the text starts like a head, or may do so when more of it has come."""
    text = text.lstrip()
    return any(text.startswith(beginning) or beginning.startswith(text) for beginning in _BEGINNINGS)


def next_mark(text: str, marks: tuple[str, ...], start: int = 0) -> tuple[int, str] | None:
    """Return the position of the first of these marks from `start` on, and the mark."""
    found = [(at, mark) for mark in marks if (at := text.find(mark, start)) >= 0]
    return min(found, default=None)
