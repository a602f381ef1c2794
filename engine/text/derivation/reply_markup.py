"""Derive the markup of a model's replies from the rendered conversations of `probes`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cellama.engine.text.formats.call_format import DESCRIBED_FORMATS, IN_CHANNELS, CallFormat
from cellama.engine.text.formats.channels import CHANNEL, MESSAGE
from cellama.engine.text.formats.literals import TAG, is_pair, mirrored, shared_start, tags_of

from .calls import derive_calls
from .probes import CONTENT, REASON, USER, VALUES, RenderedProbes

_PYTHON_TAG = "<|python_tag|>"  # Llama models write it before JSON even if their template does not
Tags = tuple[str, str]
NONE: Tags = ("", "")
_KNOWN: tuple[Tags, ...] = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_STARTS = ("start", "start thinking", "start without thinking")
_MAX_TAG = 80  # characters; longer literals are text rather than markup
_LAST_TAG = re.compile(rf"({TAG.pattern})\s*\Z")
_EMPTY_BLOCK = re.compile(rf"({TAG.pattern})\s*({TAG.pattern})\s*\Z")


@dataclass(frozen=True, slots=True)
class ReplyMarkup:
    """The reply markup derived from a template. If the tags are empty, the model does not reason."""

    think_open: str = ""
    think_close: str = ""
    calls: CallFormat | None = None
    arguments_as_text: bool = False  # the template expects the arguments of earlier calls as JSON text
    channels: bool = False  # reasoning, text and calls are messages in channels, as GPT-OSS writes them

    def __str__(self) -> str:
        if self.channels:
            return "reasoning, text and tool calls in channels"
        thinking = f"reasoning between {self.think_open} and {self.think_close}" if self.think_close else "no reasoning"
        if self.calls is None:
            return f"{thinking}, unknown tool calls (returned as text, can't be forced)"
        kinds = {"json": "as JSON", "tag": "as JSON in tags", "tagged": "as tags"}
        only_read = "" if self.calls.can_be_forced else " (can't be forced, because some are written in an unknown way)"
        return f"{thinking}, tool calls {kinds[self.calls.style]} after {self.calls.open[:40]!r}{only_read}"


def derive_markup(rendered: RenderedProbes, source: str, ends: Iterable[str] = ()) -> ReplyMarkup:
    """Return the reply markup found in the rendered conversations of `probes`.

    `ends` are the tokens that end a reply.
    """
    if f"{CHANNEL}final{MESSAGE}{CONTENT}" in (rendered.get("reply without tools") or ""):
        return ReplyMarkup(calls=IN_CHANNELS, channels=True)
    opening, closing = derive_thinking(rendered, source)
    found = derive_calls(rendered, ends, closing)
    if found is None:
        return ReplyMarkup(opening, closing, _described(rendered))
    calls, as_text = found
    calls = calls.also_after(_PYTHON_TAG) if _PYTHON_TAG in source else calls
    return ReplyMarkup(opening, closing, calls=calls, arguments_as_text=as_text)


def _described(rendered: RenderedProbes) -> CallFormat | None:
    """Return the call format that a template describes to the model without rendering any calls, or None."""
    if any(VALUES[0] in (text or "") for text in rendered.values()):
        return None
    without, with_tools = (rendered.get(name) or "" for name in ("reply without tools", "reply last"))
    formats = DESCRIBED_FORMATS.items()
    return next((format_ for tag, format_ in formats if with_tools.count(tag) > without.count(tag)), None)


# Reasoning


def derive_thinking(rendered: RenderedProbes, source: str) -> Tags:
    """Return the tags that open and close reasoning, or two empty strings if the template has no such tags."""
    for found in _candidates({name: _after_user(text) for name, text in rendered.items()}):
        return found
    # A template without reasoning of its own may still look for these tags in replies.
    return next((tags for tags in _KNOWN if any(tag in source for tag in tags)), NONE)


def _after_user(text: str | None) -> str:
    return "" if text is None else text.partition(USER)[2]


def _candidates(tails: dict[str, str]) -> Iterator[Tags]:
    """Yield candidate reasoning tags: first tags around a reply's reasoning, then tags at the start of a reply."""
    with_reasoning = [tail for name, tail in tails.items() if name.startswith("reasoning") and REASON in tail]
    for tail in with_reasoning:
        before, _, after = tail.partition(REASON)
        opening, closing = _LAST_TAG.search(before), TAG.match(after.lstrip())
        if opening and closing and is_pair(opening.group(1), closing.group()):
            yield opening.group(1), closing.group()
    for tail in with_reasoning:
        yield from _unlike(tails, *tail.partition(REASON)[::2])
    starts = [tails.get(name, "") for name in _STARTS]
    for tail in starts:
        block = _EMPTY_BLOCK.search(tail)
        if block and is_pair(block.group(1), block.group(2)):
            yield block.group(1), block.group(2)
    for tail in starts:
        opened = _LAST_TAG.search(tail)
        if opened and "think" in opened.group(1).lower() and (ends := mirrored(opened.group(1))):
            yield opened.group(1), ends


def _unlike(tails: dict[str, str], before: str, after: str) -> Iterator[Tags]:
    """Yield texts that only occur around reasoning, such as words or tags that do not form a pair."""
    others = (tails.get(name, "").partition(CONTENT)[0] for name in ("reply without tools", _STARTS[-1]))
    heads = [len(shared_start(before, other)) for other in others]
    found = (before[heads[0] :], tails.get("start", "")[heads[0] :], before[heads[1] :])
    opening = next((text.strip() for text in found if text.strip()), "")
    closing = after.partition(CONTENT)[0].strip() if CONTENT in after else next(iter(tags_of(after)), "")
    if opening and closing and max(len(opening), len(closing)) <= _MAX_TAG:
        yield opening, closing
