"""What is read from a reply, and how the model marks it up. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .formats.call_reader import ToolReader

Kind = Literal["text", "reasoning", "reasoning_end"]


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """Final text of one kind; a `reasoning_end` has none."""

    kind: Kind
    text: str = ""


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a model marks up its reply. Empty tags: it does not think. No tools: none were offered, or none are read."""

    think_open: str = ""
    think_close: str = ""
    starts_thinking: bool = False  # the template has opened the block
    thinking_budget: int | None = None  # tokens, after which the block is closed for the model
    close_tokens: tuple[int, ...] = ()  # of `think_close`
    tools: ToolReader | None = None
    channels: bool = False  # everything stands in channels: thoughts, text and calls
    bound_at_start: bool = False  # in channels: a grammar is of the whole reply, else of its text
    has_bound_calls: bool = False  # a grammar holds the calls: what begins like one is one
    is_call: bool = False  # ... and the whole reply is calls
    visible: tuple[tuple[int, bytes], ...] = ()  # control tokens that are part of the markup, and their text

    def closing_token(self, num_thinking: int) -> int | None:
        """The token that has to come next in thoughts of so many, because they are over their budget."""
        budget, closing = self.thinking_budget, self.close_tokens
        return None if budget is None or num_thinking < budget else closing[(num_thinking - budget) % len(closing)]
