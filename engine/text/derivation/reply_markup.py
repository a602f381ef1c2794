"""How a model marks up its replies, learned from what its chat template rendered (see probes). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cellama.engine.text.formats.call_format import DESCRIBED_FORMATS, IN_CHANNELS, CallFormat
from cellama.engine.text.formats.channels import CHANNEL, MESSAGE
from cellama.engine.text.formats.literals import TAG, is_pair, mirrored, shared_start, tags_of

from .calls import derive_calls
from .probes import CONTENT, REASON, USER, VALUES, Rendered

_PYTHON_TAG = "<|python_tag|>"  # models of the Llama family write it before JSON, even if their template does not
Tags = tuple[str, str]
NONE: Tags = ("", "")
_KNOWN: tuple[Tags, ...] = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_BEGUN = ("begun", "begun thinking", "begun not thinking")
_MAX_TAG = 80  # characters; longer literals are text, not markup
_LAST_TAG = re.compile(rf"({TAG.pattern})\s*\Z")
_EMPTY_BLOCK = re.compile(rf"({TAG.pattern})\s*({TAG.pattern})\s*\Z")


@dataclass(frozen=True, slots=True)
class ReplyMarkup:
    """The markup of replies, as far as a template shows it. Empty tags mean that the model does not reason."""

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
    """Derive the markup from the rendered conversations of `probes`. `ends` are the tokens that end a reply."""
    if f"{CHANNEL}final{MESSAGE}{CONTENT}" in (rendered.get("said alone") or ""):
        return ReplyMarkup(calls=IN_CHANNELS, channels=True)
    opening, closing = derive_thinking(rendered, source)
    found = derive_calls(rendered, ends, closing)
    if found is None:
        return ReplyMarkup(opening, closing, _described(rendered))
    calls, as_text = found
    calls = calls.also_after(_PYTHON_TAG) if _PYTHON_TAG in source else calls
    return ReplyMarkup(opening, closing, calls=calls, arguments_as_text=as_text)


def _described(rendered: Rendered) -> CallFormat | None:
    """Return the format that a template describes to its model, if it writes no calls itself."""
    if any(VALUES[0] in (text or "") for text in rendered.values()):
        return None
    without, with_tools = (rendered.get(name) or "" for name in ("said alone", "said last"))
    formats = DESCRIBED_FORMATS.items()
    return next((format_ for tag, format_ in formats if with_tools.count(tag) > without.count(tag)), None)


# Reasoning


def derive_thinking(rendered: Rendered, source: str) -> Tags:
    """Return the tags that open and close reasoning; two empty texts if the template has none."""
    for found in _candidates({name: _after_user(text) for name, text in rendered.items()}):
        return found
    return next(
        (tags for tags in _KNOWN if any(tag in source for tag in tags)), NONE
    )  # the template looks for them in replies


def _after_user(text: str | None) -> str:
    return "" if text is None else text.partition(USER)[2]


def _candidates(tails: dict[str, str]) -> Iterator[Tags]:
    """Yield tags around the reasoning of a reply, then those that the start of a reply shows."""
    thoughts = [tail for name, tail in tails.items() if name.startswith("thought") and REASON in tail]
    for tail in thoughts:
        before, _, after = tail.partition(REASON)
        opening, closing = _LAST_TAG.search(before), TAG.match(after.lstrip())
        if opening and closing and is_pair(opening.group(1), closing.group()):
            yield opening.group(1), closing.group()
    for tail in thoughts:
        yield from _unlike(tails, *tail.partition(REASON)[::2])
    begun = [tails.get(name, "") for name in _BEGUN]
    for tail in begun:
        block = _EMPTY_BLOCK.search(tail)
        if block and is_pair(block.group(1), block.group(2)):
            yield block.group(1), block.group(2)
    for tail in begun:
        begins = _LAST_TAG.search(tail)
        if begins and "think" in begins.group(1).lower() and (ends := mirrored(begins.group(1))):
            yield begins.group(1), ends


def _unlike(tails: dict[str, str], before: str, after: str) -> Iterator[Tags]:
    """Yield what comes before reasoning and in no other turn, and what follows it: words, or tags that don't pair."""
    others = (tails.get(name, "").partition(CONTENT)[0] for name in ("said alone", _BEGUN[-1]))
    heads = [len(shared_start(before, other)) for other in others]
    found = (before[heads[0] :], tails.get("begun", "")[heads[0] :], before[heads[1] :])
    opening = next((text.strip() for text in found if text.strip()), "")
    closing = after.partition(CONTENT)[0].strip() if CONTENT in after else next(iter(tags_of(after)), "")
    if opening and closing and max(len(opening), len(closing)) <= _MAX_TAG:
        yield opening, closing
