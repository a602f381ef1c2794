"""Read grammar-enforced calls while the model is writing them.

Such calls can't turn out to be text, so a call's name and arguments are final as soon as more output can't change them.
"""

from __future__ import annotations

import json
from dataclasses import replace

from .arguments_stream import ArgumentsReader, JsonArguments, TaggedArguments
from .call_reader import ToolReader, after, patterns_of
from .calls import CallDelta, ParsedToolCall, encodable


class CallPieces:
    """Collects the pieces of one reply's calls."""

    def __init__(self, only_one: bool) -> None:
        self._only_one = only_one
        self._new: list[CallDelta] = []
        self._names: list[str] = []
        self._arguments: list[list[str]] = []
        self._is_last_partial = False

    def __len__(self) -> int:
        return len(self._names)

    def start(self, name: str) -> None:
        """Add a call with this name."""
        self._names.append(encodable(name))
        self._arguments.append([])
        self._new.append(CallDelta(len(self._names) - 1, name=self._names[-1]))

    def add(self, arguments: str) -> None:
        """Add a piece of the last call's arguments."""
        if arguments:
            self._arguments[-1].append(arguments)
            self._new.append(CallDelta(len(self._names) - 1, arguments=arguments))

    def cut(self, arguments: str) -> None:
        """Add the final piece of an incomplete call."""
        self.add(arguments)
        self._is_last_partial = True

    def take(self) -> tuple[CallDelta, ...]:
        """Return and clear the new pieces. Adjacent pieces of the same call are joined."""
        joined: list[CallDelta] = []
        for delta in self._new:
            if self._only_one and delta.number:
                continue
            if joined and joined[-1].number == delta.number:
                joined[-1] = replace(joined[-1], arguments=joined[-1].arguments + delta.arguments)
            else:
                joined.append(delta)
        self._new.clear()
        return tuple(joined)

    def calls(self) -> tuple[ParsedToolCall, ...]:
        """Return all calls that have been read so far."""
        num = min(len(self._names), 1) if self._only_one else len(self._names)
        return tuple(
            ParsedToolCall(name, "".join(pieces), is_partial=self._is_last_partial and number == len(self._names) - 1)
            for number, (name, pieces) in enumerate(zip(self._names[:num], self._arguments, strict=False))
        )


class CallStream:
    """Reads the part of a reply that starts with the first call."""

    def __init__(self, tools: ToolReader) -> None:
        """Create a reader that starts before the first call. All calls are to the offered tools."""
        self._tools = tools
        self._patterns = patterns_of(tools.format)
        self._text = ""  # not read yet
        self._around: list[str] = []  # the text before the first call, and between calls
        self._arguments: ArgumentsReader | None = None  # of the current call, until its markup ends
        self.pieces = CallPieces(tools.only_one)

    def push(self, text: str) -> None:
        """Add the next piece of the reply's text, and read the calls in this piece."""
        self._text += text
        while self._find_call() if self._arguments is None else self._read_arguments(self._arguments):
            pass

    def finish(self, *, cut: bool) -> tuple[tuple[ParsedToolCall, ...], str]:
        """Return the calls and the surrounding text.

        Set `cut` if generation stopped early. In this case, the last call may be partial, and an incomplete start of a
        call is dropped.
        """
        if not self.pieces:
            if cut:
                return (), "" if self._is_start_of_call() else self._text
            return self._tools.parse(self._text)
        if self._arguments is None:
            self._around.append(self._text_after_calls(cut))
        elif not self._arguments.is_complete:
            self.pieces.cut(self._arguments.cut(self._text))
        return self.pieces.calls(), "".join(self._around).rstrip()

    def _find_call(self) -> bool:
        """Start reading the next call. Return False if the start of the call is incomplete or no call follows."""
        text, at = self._text, 0
        if self.pieces:
            if self._start_call(after(self._patterns.between, text, 0)):
                return True
            at = len(text[: after(self._patterns.after, text, 0)].rstrip())
        found = self._tools.find(text[at:], at_start=not self.pieces)
        if found is None or not self._start_call(after(self._patterns.before, text, at + found)):
            return False
        self._around.append(text[at : at + found])
        return True

    def _start_call(self, at: int) -> bool:
        """Start reading the call at this position. Return False if the start of the call is incomplete."""
        text, format_, patterns = self._text, self._tools.format, self._patterns
        is_bare = (
            not self.pieces
            and format_.bare_json
            and not any(text.lstrip().startswith(marker) for marker in format_.markers)
        )
        head = (patterns.bare_head if is_bare else patterns.head).match(text, at)
        if head is None or (format_.style == "tag" and not text.startswith("{", head.end())):
            return False
        name = _decoded(head.group(1)) if format_.style == "json" else head.group(1)
        if not self._tools.offers(name):
            return False
        if format_.tags is None:
            self._arguments = JsonArguments(head.group() if format_.style == "json" else "")
        elif patterns.closing is None:
            return False
        else:
            parameters = self._tools.parameters.get(name, {})
            self._arguments = TaggedArguments(
                format_.tags, parameters, patterns.argument, patterns.separator, patterns.closing
            )
        self.pieces.start(name)
        self._text = text[head.end() :]
        return True

    def _read_arguments(self, arguments: ArgumentsReader) -> bool:
        """Read more of the arguments. Return True if the call has ended."""
        new, length = arguments.read(self._text)
        self.pieces.add(new)
        self._text = self._text[length:]
        if not arguments.is_closed:
            return False
        self._arguments = None
        return True

    def _text_after_calls(self, cut: bool) -> str:
        """Return the text after the last call, without markup."""
        text = self._text
        closed = after(self._patterns.after, text, 0)
        if not cut:
            return text[len(text[:closed].rstrip()) :]
        if self._is_markup(text[closed:]):
            return ""
        text = text[len(text[:closed].rstrip()) :]
        return text[: self._tools.find(text, at_start=False)]

    def _is_markup(self, text: str) -> bool:
        """Return True if the text is part of the markup between or after calls."""
        compact, format_ = "".join(text.split()), self._tools.format
        wholes = (format_.middle or "", format_.close, format_.between, format_.tail)
        return any(compact and compact in "".join(whole.split()) for whole in wholes)

    def _is_start_of_call(self) -> bool:
        """Return True if the unread text may be the start of a call.

        The grammar excludes text that starts like a JSON call but isn't a JSON call.
        """
        text, format_ = "".join(self._text.split()), self._tools.format
        if not format_.bare_json or any(text.startswith(marker) for marker in format_.markers):
            return True
        head = "".join(format_.open_without_markers.split())
        return head.startswith(text) or text.startswith(head)


def _decoded(name: str) -> str:
    """Return the decoded content of a JSON string, or the same text if it is not a valid string."""
    try:
        return str(json.loads(f'"{name}"'))
    except ValueError:
        return name
