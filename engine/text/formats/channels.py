"""The reply format of GPT-OSS (harmony).

A reply is a series of messages, each in a channel. A message with a recipient is a tool call. Two examples:

<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>text<|return|>
<|channel|>commentary to=functions.name <|constrain|>json<|message|>{"x": 1}<|call|>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
ENDS = (END, "<|call|>", "<|return|>")  # each ends a message
MARKUP = (CHANNEL, MESSAGE, START, "<|constrain|>", *ENDS)
FUNCTIONS = "functions."
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|\s|>)to=([^\s<]+)")
_HEAD_STARTS = (CHANNEL, START, MESSAGE, "to=", "assistant")


@dataclass(frozen=True, slots=True)
class MessageHead:
    """The header of a message, with its channel and its recipient."""

    channel: str
    recipient: str = ""

    @property
    def function(self) -> str | None:
        """The name of the function that this message calls, or None."""
        return self.recipient.removeprefix(FUNCTIONS) if self.recipient.startswith(FUNCTIONS) else None


def head_of(text: str) -> MessageHead:
    """Parse the header of a message. `text` excludes the final `<|message|>`."""
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    return MessageHead(channel.group(1) if channel else "final", recipient.group(1) if recipient else "")


def may_be_head(text: str) -> bool:
    """Return True if the text starts like a message header, or may start like one after more text has arrived."""
    text = text.lstrip()
    return any(text.startswith(start) or start.startswith(text) for start in _HEAD_STARTS)


def next_mark(text: str, marks: tuple[str, ...], start: int = 0) -> tuple[int, str] | None:
    """Return the position of the first mark at or after `start`, and the mark itself, or None if there is no mark."""
    found = [(at, mark) for mark in marks if (at := text.find(mark, start)) >= 0]
    return min(found, default=None)
