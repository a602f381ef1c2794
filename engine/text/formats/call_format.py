"""How a model writes tool calls: in JSON, in tags with JSON, or in tags with an argument in each. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Style = Literal["json", "tag", "tagged"]


@dataclass(frozen=True, slots=True)
class ArgumentTags:
    """The literals around an argument: `open` name `sep` value `close`, and a `gap` before the next argument."""

    open: str
    sep: str
    close: str
    gap: str = ""
    sep_of_json: str = ""  # before a value that is not text; often the same


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way of writing tool calls. The literals may have slots.

    A grammar writes `open` name `inner` arguments, then `middle` name `inner` arguments for each further call, then
    `close`. A reader expects `lead`, calls with `between` between them, and `tail`. Each call is a JSON object, or
    `prefix` name `inner` arguments.
    """

    style: Style
    open: str
    inner: str
    close: str
    middle: str | None = None  # None: one call in a reply
    lead: str = ""
    prefix: str = ""
    between: str = ""
    tail: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    name_is_key: bool = False  # {"name": {…arguments…}}
    tags: ArgumentTags | None = None
    markers: tuple[str, ...] = ()  # that open the calls, anywhere in the reply
    may_be_bare: bool = False  # calls may lack the marker
    can_be_forced: bool = True  # False: the template writes some calls in another way

    def also_after(self, marker: str) -> CallFormat:
        """Return the format with one more marker, if nothing else distinguishes calls from text."""
        return replace(self, markers=(marker,), may_be_bare=True) if self.bare_json else self

    @property
    def bare_json(self) -> bool:
        """Whether calls differ from text only by being JSON."""
        return self.style == "json" and (self.may_be_bare or not self.markers)

    @property
    def literals(self) -> tuple[str, ...]:
        """All literals that a model may write with control tokens."""
        tags = self.tags
        inside = (tags.open, tags.sep, tags.sep_of_json, tags.close, tags.gap) if tags else ()
        inner = () if self.style == "json" else (self.prefix, self.inner)
        return (*self.markers, self.lead, self.between, self.tail, *inner, *inside)


# The calls of GPT-OSS, after its reasoning; `channel_reader` reads them.
IN_CHANNELS = CallFormat(
    "tag", open="<|channel|>commentary to=functions.", inner=" <|constrain|>json<|message|>", close=""
)


def _objects(marker: str, begin: str, between: str, tail: str) -> CallFormat:
    """Return the format of JSON objects with a name and arguments, in this order."""
    name = '{"name": "'
    return CallFormat(
        "json",
        open=f"{marker}{begin}{name}",
        inner='", "arguments": ',
        close="}" + tail,
        middle="}" + between + name,
        lead=marker + begin,
        between=between,
        tail=tail,
        markers=(marker,),
    )


DESCRIBED_FORMATS = {  # some templates describe calls in the system message, and write none
    "<tool_call>": _objects("<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    "<|tool_call|>": _objects("<|tool_call|>", "[", ", ", "]"),
}
