"""Finds out between which tags a model thinks, from conversations that its template rendered (see probes). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cellama.engine.text.formats.literals import TAG, is_pair, mirrored, shared_start, tags_of

from .probes import CONTENT, REASON, USER, Rendered

Tags = tuple[str, str]
NONE: Tags = ("", "")
_KNOWN: tuple[Tags, ...] = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_BEGUN = ("begun", "begun thinking", "begun not thinking")
_MAX_LITERAL = 80
_LAST_TAG = re.compile(rf"({TAG.pattern})\s*\Z")
_EMPTY_BLOCK = re.compile(rf"({TAG.pattern})\s*({TAG.pattern})\s*\Z")


def derive_thinking(rendered: Rendered, source: str) -> Tags:
    """What opens and what closes a block of thoughts; two empty texts if the template knows of none."""
    for found in _candidates({name: _after_user(text) for name, text in rendered.items()}):
        return found
    return next((tags for tags in _KNOWN if any(tag in source for tag in tags)), NONE)  # it looks for them in replies


def _after_user(text: str | None) -> str:
    return "" if text is None else text.partition(USER)[2]


def _candidates(tails: dict[str, str]) -> Iterator[Tags]:
    """Tags by what the template does with a reply's thoughts, and else by how it begins a reply."""
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
    """Tags that are no pair, or words: what stands before thoughts and in no other turn, and what stands behind."""
    others = (tails.get(name, "").partition(CONTENT)[0] for name in ("said alone", _BEGUN[-1]))
    heads = [len(shared_start(before, other)) for other in others]
    found = (before[heads[0] :], tails.get("begun", "")[heads[0] :], before[heads[1] :])
    opening = next((text.strip() for text in found if text.strip()), "")
    closing = after.partition(CONTENT)[0].strip() if CONTENT in after else next(iter(tags_of(after)), "")
    if opening and closing and max(len(opening), len(closing)) <= _MAX_LITERAL:
        yield opening, closing
