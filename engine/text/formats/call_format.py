"""Define tool call formats, which use JSON, JSON in tags, or tags around each argument."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Style = Literal["json", "tag", "tagged"]


@dataclass(frozen=True, slots=True)
class ArgumentTags:
    """The literals around an argument: `open` name `sep` value `close`, then `gap` before the next argument."""

    open: str
    sep: str
    close: str
    gap: str = ""
    sep_of_json: str = ""  # literal before a value that is not a string; often equal to `sep`

    def trimmed(self, value: str) -> str:
        """Return the value without the line breaks that belong to the tags around the value."""
        if self.sep.endswith("\n"):
            value = value.removeprefix("\n")
        return value.removesuffix("\n") if self.close.startswith("\n") else value


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A tool call format. The format's literals may contain slots (literals.py).

    A grammar writes `open` NAME `inner` ARGUMENTS, then `middle` NAME `inner` ARGUMENTS for each further call, then
    `close`. A reader accepts `lead`, followed by calls separated by `between`, followed by `tail`. Each of these calls
    is a JSON object, or `prefix` NAME `inner` ARGUMENTS.
    """

    style: Style
    open: str
    inner: str
    close: str
    middle: str | None = None  # None: at most one call per reply
    lead: str = ""
    prefix: str = ""
    between: str = ""
    tail: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    name_is_key: bool = False  # {"name": {…arguments…}}
    tags: ArgumentTags | None = None
    markers: tuple[str, ...] = ()  # texts that start the calls, anywhere in the reply
    may_be_bare: bool = False  # calls may have no marker
    can_be_forced: bool = True  # False: the template writes some calls in an unknown way

    def also_after(self, marker: str) -> CallFormat:
        """Return a format that also accepts calls after `marker`, if only JSON syntax distinguishes calls from text."""
        return replace(self, markers=(marker,), may_be_bare=True) if self.bare_json else self

    @property
    def bare_json(self) -> bool:
        """True if only JSON syntax distinguishes calls from text."""
        return self.style == "json" and (self.may_be_bare or not self.markers)

    @property
    def open_without_markers(self) -> str:
        """The text that a call without a marker starts with."""
        opening = self.open
        for marker in self.markers:
            opening = opening.removeprefix(marker)
        return opening

    @property
    def literals(self) -> tuple[str, ...]:
        """All literals that may contain control tokens."""
        tags = self.tags
        inside = (tags.open, tags.sep, tags.sep_of_json, tags.close, tags.gap) if tags else ()
        inner = () if self.style == "json" else (self.prefix, self.inner)
        return (*self.markers, self.lead, self.between, self.tail, *inner, *inside)


# The calls of GPT-OSS, which `ChannelReader` reads.
IN_CHANNELS = CallFormat(
    "tag", open="<|channel|>commentary to=functions.", inner=" <|constrain|>json<|message|>", close=""
)


def _json_objects(marker: str, start: str, between: str, tail: str) -> CallFormat:
    """Return the format of JSON objects with a name and arguments, in this order."""
    name = '{"name": "'
    return CallFormat(
        "json",
        open=f"{marker}{start}{name}",
        inner='", "arguments": ',
        close="}" + tail,
        middle="}" + between + name,
        lead=marker + start,
        between=between,
        tail=tail,
        markers=(marker,),
    )


DESCRIBED_FORMATS = {  # formats that some templates describe in the system message without writing calls themselves
    "<tool_call>": _json_objects("<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    "<|tool_call|>": _json_objects("<|tool_call|>", "[", ", ", "]"),
}
