"""Requests of other servers' tests with the replies that these tests expect.

Each table has the facts of another project's tests in our own form. A pair either expects what the other server
returns, or names a row of DIFFERENCES and expects what our documentation promises instead. The page
docs/reference/differences.md is generated from these rows, and tests/integration/gateway/test_pairs.py sends all pairs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from httpx import Client, Response

Body = Mapping[str, Any] | str | None
Expected = Mapping[str, Any]


class Absent:
    """The value of a path that leads nowhere."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent()


@dataclass(frozen=True, slots=True)
class Difference:
    """A row of the documentation: `there` is the other server's behavior, and `here` is ours with its reason."""

    there: str
    here: str
    instead: str


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. A body that is text is sent as it is. `key` sends it to the gateway with API keys."""

    path: str
    body: Body = None
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A request and the reply that is expected.

    Paths such as `choices.*.index` lead to the values in the reply that `expect` describes (see `problems`). The
    request and the expectation may be functions of the replies to `before`, the requests that are sent first.
    """

    name: str
    ask: Ask | Callable[..., Ask]
    expect: Expected | Callable[..., Expected] = field(default_factory=dict)
    status: int = 200
    before: Sequence[Ask | Callable[..., Ask]] = ()
    differs: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """The pairs of one source, and the rows for those that differ."""

    source: str
    pairs: Sequence[Pair]
    differences: Mapping[str, Difference]


class Reply:
    """The reply to a request, with the events of a stream as JSON."""

    def __init__(self, response: Response) -> None:
        self.status = response.status_code
        self.headers = {name.lower(): value for name, value in response.headers.items()}
        self.raw = response.text
        self.is_stream = "event-stream" in self.headers.get("content-type", "")
        self.events: list[Any] = []
        self.body: Any = None
        if self.is_stream:
            data = [line.partition(":")[2].strip() for line in self.raw.splitlines() if line.startswith("data:")]
            self.events = [json.loads(line) for line in data if line != "[DONE]"]
        elif "json" in self.headers.get("content-type", ""):
            self.body = response.json()

    @property
    def types(self) -> list[str]:
        return [event.get("type", "") for event in self.events]

    @property
    def last(self) -> Any:
        return self.events[-1] if self.events else None

    @property
    def final(self) -> Any:
        """The object that the last event of a stream of /v1/responses contains, or the body."""
        return self.last["response"] if self.is_stream else self.body

    @property
    def text(self) -> str:
        """The text of the first answer, in the format of any endpoint."""
        if self.is_stream:
            return "".join(map(_text_of_event, self.events))
        if "choices" in self.body:
            choice = self.body["choices"][0]
            return choice.get("text") or choice.get("message", {}).get("content") or ""
        parts = self.body.get("content") or []
        parts = [*parts, *(part for item in self.body.get("output", []) for part in item.get("content", []))]
        return "".join(part["text"] for part in parts if part["type"] in ("text", "output_text"))

    @property
    def message(self) -> str:
        """The message of an error."""
        return self.body["error"]["message"]

    def at(self, path: str) -> Any:
        """Return the value at a path. `*` gives a list of the values of all members, and `#` their number.

        Paths start in the body, or with `events`, `types`, `last`, `final`, `text`, `message` or `headers`.
        """
        first, _, rest = path.partition(".")
        own = ("events", "types", "last", "final", "text", "message", "headers", "body", "raw")
        return _at(getattr(self, first), rest) if first in own else _at(self.body, path)


def _text_of_event(event: Any) -> str:
    if event.get("choices"):
        choice = event["choices"][0]
        return "" if choice["index"] else choice.get("text") or choice.get("delta", {}).get("content") or ""
    if event.get("type") == "content_block_delta":
        return event["delta"].get("text", "")
    return event["delta"] if event.get("type") == "response.output_text.delta" else ""


def _at(value: Any, path: str) -> Any:
    if not path:
        return value
    first, _, rest = path.partition(".")
    if first == "#":
        return len(value)
    if first == "*":
        members = value.values() if isinstance(value, dict) else value
        return [_at(member, rest) for member in members]
    if isinstance(value, list) and first.lstrip("-").isdigit():
        return _at(value[int(first)], rest) if -len(value) <= int(first) < len(value) else ABSENT
    return _at(value[first], rest) if isinstance(value, dict) and first in value else ABSENT


def problems(reply: Reply, status: int, expect: Expected) -> list[str]:
    """Compare a reply with an expectation.

    An expected value is a type, a pattern, a function that returns whether the value is right, or the value itself.
    Below a `*`, each value must match.
    """
    if reply.status != status:
        return [f"status {reply.status} instead of {status}: {reply.raw[:600]}"]
    found = []
    for path, expected in expect.items():
        value = reply.at(path)
        is_function = callable(expected) and not isinstance(expected, type)
        for one in value if "*" in path.split(".") and not is_function else [value]:
            if not matches(one, expected):
                found.append(f"{path} is {one!r:.300}, expected {expected!r}")
    return found


def matches(value: Any, expected: Any) -> bool:
    if isinstance(expected, re.Pattern):
        return isinstance(value, str) and expected.search(value) is not None
    if isinstance(expected, type):
        return type(value) is expected
    return bool(expected(value)) if callable(expected) else value == expected and type(value) is type(expected)


def send(client: Client, ask: Ask) -> Reply:
    """Send a request. The client's base URL leads to the gateway."""
    content: dict[str, Any] = {}
    if isinstance(ask.body, str):
        content = {"content": ask.body, "headers": {"content-type": "application/json", **ask.headers}}
    elif ask.body is not None:
        content = {"json": ask.body, "headers": dict(ask.headers)}
    else:
        content = {"headers": dict(ask.headers)}
    return Reply(client.request(ask.method, ask.path, **content))


def run(client_of: Callable[[Ask], Client], pair: Pair) -> list[str]:
    """Send the requests of a pair, and return what differs from its expectation."""
    replies: list[Reply] = []
    for earlier in (*pair.before, pair.ask):
        ask = earlier if isinstance(earlier, Ask) else earlier(*replies)
        replies.append(send(client_of(ask), ask))
    *before, reply = replies
    for earlier_reply in before:
        if earlier_reply.status >= 400:
            return [f"an earlier request failed: {earlier_reply.raw[:600]}"]
    expect = pair.expect(*before) if callable(pair.expect) else pair.expect
    return problems(reply, pair.status, expect)


def rows(table: Table) -> list[tuple[str, str, str]]:
    """Return the rows of the documentation."""
    return [(row.there, row.here, row.instead) for row in table.differences.values()]


def summary(table: Table) -> str:
    """Return how many pairs pass and differ, in a sentence of the documentation."""
    num_different = sum(bool(pair.differs) for pair in table.pairs)
    return (
        f"{len(table.pairs)} requests from {table.source} are part of our tests: "
        f"{len(table.pairs) - num_different} get the reply that these tests expect, and {num_different} differ:"
    )
