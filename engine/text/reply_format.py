"""The parts of a reply, and how the model marks them up. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .formats.call_reader import ToolReader

Kind = Literal["text", "reasoning", "reasoning_end"]


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """Final text of one kind; empty for `reasoning_end`."""

    kind: Kind
    text: str = ""


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a model marks up its reply. Without tags it does not reason; without `tools` no calls are read."""

    think_open: str = ""
    think_close: str = ""
    starts_thinking: bool = False  # the template has opened the block
    thinking_budget: int | None = None  # tokens, after which the closing tag is forced
    close_tokens: tuple[int, ...] = ()  # of `think_close`
    tools: ToolReader | None = None
    channels: bool = False  # reasoning, text and calls are messages in channels
    bound_at_start: bool = False  # in channels: a grammar binds the whole reply, else only its text
    has_bound_calls: bool = False  # a grammar enforces calls, so what starts like a call is one
    is_call: bool = False  # the whole reply is calls
    visible: tuple[tuple[int, bytes], ...] = ()  # control tokens that are part of the markup, and their text

    def closing_token(self, num_thinking: int) -> int | None:
        """Return the token that must come next if that many reasoning tokens exceed the budget; else None."""
        budget, closing = self.thinking_budget, self.close_tokens
        return None if budget is None or num_thinking < budget else closing[(num_thinking - budget) % len(closing)]
