"""Messages like one that Celery and kombu have built, without building each of them anew.

Jobs of one queue differ in few places of their message and of its `task-sent` event. What lies between is taken from
the text of the first one; a template that would not give that one again, letter by letter, is none.
"""

from __future__ import annotations

import base64
import json
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from cellama.tasks.contract.names import SUBMITTED_AT_HEADER
from cellama.tasks.state.records import Message

Place = tuple[str, ...]  # of a value in a JSON object

ID, TAG, BODY, AT, ARGS, KWARGS, NOW, CLOCK = "id", "tag", "body", "at", "args", "kwargs", "now", "clock"
MESSAGE: Mapping[Place, str] = {
    ("body",): BODY,
    ("headers", "id"): ID,
    ("headers", "root_id"): ID,
    ("headers", "argsrepr"): ARGS,
    ("headers", "kwargsrepr"): KWARGS,
    ("headers", SUBMITTED_AT_HEADER): AT,
    ("properties", "correlation_id"): ID,
    ("properties", "delivery_tag"): TAG,
}
EVENT_FRAME: Mapping[Place, str] = {("body",): BODY, ("properties", "delivery_tag"): TAG}
EVENT: Mapping[Place, str] = {
    ("uuid",): ID,
    ("root_id",): ID,
    ("args",): ARGS,
    ("kwargs",): KWARGS,
    ("timestamp",): NOW,
    ("clock",): CLOCK,
}


NO_MORE: Mapping[str, str] = {}


class _Text:
    """A JSON text with places for values, which are JSON texts, too."""

    def __init__(self, text: str, places: Mapping[Place, str]) -> None:
        """Raises KeyError, ValueError if this is no such text."""
        parsed, mark = json.loads(text), uuid.uuid4().hex
        self.first: dict[str, str] = {}  # the values that it had
        for place, name in places.items():
            *outer, last = place
            inner = parsed
            for key in outer:
                inner = inner[key]
            if self.first.setdefault(name, json.dumps(inner[last])) != json.dumps(inner[last]):
                raise ValueError(f"two values for {name}")
            inner[last] = f"{mark} {name} {mark}"
        text = json.dumps(parsed).replace("%", "%%")
        self._format = text.replace(f'"{mark} ', "%(").replace(f' {mark}"', ")s")

    def fill(self, values: Mapping[str, str]) -> str:
        return self._format % values


class Template:
    """The message of a job, and its event if there is one, with places for those of another job."""

    def __init__(self, message: Message, payload_json: str, more: Iterable[str] = ()) -> None:
        """`payload_json` is the list of args and kwargs that the message holds, `more` are headers whose values differ,
        too. Raises KeyError, ValueError."""
        self._key = message.key
        self._text = _Text(message.payload, {**MESSAGE, **{("headers", name): name for name in more}})
        body = _decoded(self._text.first[BODY])
        if not body.startswith(payload_json[:-1]):
            raise ValueError("another body than kombu's")
        self._rest_of_body = body[len(payload_json) - 1 :]
        self._events: list[tuple[str, _Text, _Text]] = []
        for topic, text in message.events:
            frame = _Text(text, EVENT_FRAME)
            self._events.append((topic, frame, _Text(_decoded(frame.first[BODY]), EVENT)))
        self._check(message, payload_json)

    def _check(self, message: Message, payload_json: str) -> None:
        again = self._fill(self._text.first, payload_json, [(frame.first, own.first) for _, frame, own in self._events])
        if again != message:
            raise ValueError("not the message that it was made from")

    def message(
        self,
        job_id: str,
        payload_json: str,
        shown: tuple[str, str],
        submitted_at: float,
        clock: int | None,
        more: Mapping[str, str] = NO_MORE,
    ) -> Message:
        """That of another job. `shown` is what Flower shows of its arguments, `clock` Celery's logical one; without it
        the message has no event. `more` are the headers that the template was made with."""
        args, kwargs = shown
        own = {
            ID: quoted(job_id),
            TAG: _tag(),
            ARGS: quoted(args),
            KWARGS: quoted(kwargs),
            AT: json.dumps(submitted_at),
            **{name: quoted(value) for name, value in more.items()},
        }
        if clock is None:
            return self._fill(own, payload_json, [])
        now = {**own, NOW: repr(time.time()), CLOCK: str(clock)}
        return self._fill(own, payload_json, [({TAG: _tag()}, now) for _ in self._events])

    def _fill(
        self,
        values: Mapping[str, str],
        payload_json: str,
        of_events: Iterable[tuple[Mapping[str, str], Mapping[str, str]]],
    ) -> Message:
        text = self._text.fill({**values, BODY: _encoded(payload_json[:-1] + self._rest_of_body)})
        events = tuple(
            (topic, frame.fill({**of_frame, BODY: _encoded(event.fill(of_event))}))
            for (topic, frame, event), (of_frame, of_event) in zip(self._events, of_events, strict=False)
        )
        return Message(self._key, text, events)


def _tag() -> str:
    """A name for one message: kombu takes any."""
    return f'"{os.urandom(16).hex()}"'


def _decoded(body: str) -> str:
    return base64.b64decode(json.loads(body)).decode()


def _encoded(text: str) -> str:
    return f'"{base64.b64encode(text.encode()).decode()}"'


class Templates:
    """Templates by what their messages have in common."""

    LIMIT = 256

    def __init__(self) -> None:
        self._templates: dict[Sequence[Any], Template | None] = {}

    def get(self, common: Sequence[Any]) -> Template | None:
        return self._templates.get(common)

    def learn(self, common: Sequence[Any], message: Message, payload_json: str, more: Iterable[str] = ()) -> None:
        """Makes a template of a message; one that can't be made is not tried again."""
        if common in self._templates or len(self._templates) >= self.LIMIT:
            return
        try:
            self._templates[common] = Template(message, payload_json, more)
        except (KeyError, TypeError, ValueError):
            self._templates[common] = None
