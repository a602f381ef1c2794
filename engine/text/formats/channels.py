"""GPT-OSS's way of marking up a reply (harmony): messages, each with a channel, and calls that go to a recipient. Pure.

<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>text<|return|>
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
    """What stands before a message's text: the channel, and to whom it goes."""

    channel: str
    recipient: str = ""

    @property
    def function(self) -> str | None:
        """The function that this message calls."""
        return self.recipient.removeprefix(FUNCTIONS) if self.recipient.startswith(FUNCTIONS) else None


def head_of(text: str) -> MessageHead:
    """The head that this is, without its `<|message|>`."""
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    return MessageHead(channel.group(1) if channel else "final", recipient.group(1) if recipient else "")


def may_be_head(text: str) -> bool:
    """True if the text begins like a head, or may come to."""
    text = text.lstrip()
    return any(text.startswith(beginning) or beginning.startswith(text) for beginning in _BEGINNINGS)


def next_mark(text: str, marks: tuple[str, ...], start: int = 0) -> tuple[int, str] | None:
    """Where the first of these stands from `start` on, and which it is."""
    found = [(at, mark) for mark in marks if (at := text.find(mark, start)) >= 0]
    return min(found, default=None)
