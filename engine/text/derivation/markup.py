"""How a model marks up its replies, learned from its chat template. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cellama.engine.text.formats.call_format import IN_CHANNELS, TOLD_IN_WORDS, CallFormat
from cellama.engine.text.formats.channels import CHANNEL, MESSAGE

from .calls import derive_calls
from .probes import CONTENT, VALUES, Rendered
from .thinking import derive_thinking

_PYTHON_TAG = "<|python_tag|>"  # Llama's models write it before JSON, whether their template does or not


@dataclass(frozen=True, slots=True)
class ReplyMarkup:
    """What a template shows of the replies that its model writes. Empty tags: it does not think."""

    think_open: str = ""
    think_close: str = ""
    calls: CallFormat | None = None
    arguments_as_text: bool = False  # the template takes the arguments of earlier calls as text
    channels: bool = False  # everything stands in channels, GPT-OSS's way

    def __str__(self) -> str:
        if self.channels:
            return "thoughts, text and tool calls in channels"
        thinking = f"thoughts between {self.think_open} and {self.think_close}" if self.think_close else "no thoughts"
        if self.calls is None:
            return f"{thinking}, no tool calls that are known (they stay text, and none can be forced)"
        kinds = {"json": "as JSON", "tag": "as JSON in tags", "tagged": "as tags"}
        only_read = "" if self.calls.can_be_forced else " (not all of them are known, so none can be forced)"
        return f"{thinking}, tool calls {kinds[self.calls.style]} after {self.calls.open[:40]!r}{only_read}"


def derive_markup(rendered: Rendered, source: str, ends: Iterable[str] = ()) -> ReplyMarkup:
    """What the conversations of `probes` show, as a template rendered them; `ends` are the tokens that end a reply."""
    if f"{CHANNEL}final{MESSAGE}{CONTENT}" in (rendered.get("said alone") or ""):
        return ReplyMarkup(calls=IN_CHANNELS, channels=True)
    opening, closing = derive_thinking(rendered, source)
    found = derive_calls(rendered, ends, closing)
    if found is None:
        return ReplyMarkup(opening, closing, _told(rendered))
    calls, as_text = found
    return ReplyMarkup(opening, closing, calls.also_after(_PYTHON_TAG) if _PYTHON_TAG in source else calls, as_text)


def _told(rendered: Rendered) -> CallFormat | None:
    """The format that a template tells its model in words, if it writes no calls itself."""
    if any(VALUES[0] in (text or "") for text in rendered.values()):
        return None
    without, told = (rendered.get(name) or "" for name in ("said alone", "said last"))
    return next((form for tag, form in TOLD_IN_WORDS.items() if told.count(tag) > without.count(tag)), None)
