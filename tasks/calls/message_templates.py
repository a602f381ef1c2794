"""Make messages from the text of one that Celery and kombu have built, which is much faster than building each of them.

Jobs of one queue differ in few values of their message and of its `task-sent` event. A template is the text between
these values. A message from which its template would not reproduce the same text, letter by letter, gets no template.
"""

from __future__ import annotations

import base64
import json
import os
import time
import uuid
from collections.abc import Hashable, Iterable, Mapping
from json.encoder import encode_basestring_ascii as quoted

from cellama.tasks.contract.names import SUBMITTED_AT_HEADER
from cellama.tasks.state.records import Message

Path = tuple[str, ...]  # of a value in a JSON object

ID, TAG, BODY, AT, ARGS, KWARGS, NOW, CLOCK = "id", "tag", "body", "at", "args", "kwargs", "now", "clock"
MESSAGE: Mapping[Path, str] = {
    ("body",): BODY,
    ("headers", "id"): ID,
    ("headers", "root_id"): ID,
    ("headers", "argsrepr"): ARGS,
    ("headers", "kwargsrepr"): KWARGS,
    ("headers", SUBMITTED_AT_HEADER): AT,
    ("properties", "correlation_id"): ID,
    ("properties", "delivery_tag"): TAG,
}
EVENT_FRAME: Mapping[Path, str] = {("body",): BODY, ("properties", "delivery_tag"): TAG}
EVENT: Mapping[Path, str] = {
    ("uuid",): ID,
    ("root_id",): ID,
    ("args",): ARGS,
    ("kwargs",): KWARGS,
    ("timestamp",): NOW,
    ("clock",): CLOCK,
}


class _JsonTemplate:
    """A JSON text in which values, which are JSON texts as well, can be replaced."""

    def __init__(self, text: str, paths: Mapping[Path, str]) -> None:
        """Raise KeyError or ValueError if the text is not JSON with these values."""
        parsed, mark = json.loads(text), uuid.uuid4().hex
        self.first: dict[str, str] = {}  # the values of this text
        for path, name in paths.items():
            *outer, last = path
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
    """The message of a job, and its `task-sent` event if it has one, for use with the values of other jobs."""

    def __init__(self, message: Message, payload_json: str, trace_headers: Iterable[str] = ()) -> None:
        """Make a template of a message that Celery has built.

        `payload_json` is the list of args and kwargs in its body. `trace_headers` are headers with a value per job.
        Raises KeyError or ValueError if the message is not of the expected form.
        """
        self._key = message.key
        self._text = _JsonTemplate(message.payload, {**MESSAGE, **{("headers", name): name for name in trace_headers}})
        body = _decoded(self._text.first[BODY])
        if not body.startswith(payload_json[:-1]):
            raise ValueError("the body does not begin with the arguments")
        self._rest_of_body = body[len(payload_json) - 1 :]
        self._events: list[tuple[str, _JsonTemplate, _JsonTemplate]] = []
        for topic, text in message.events:
            frame = _JsonTemplate(text, EVENT_FRAME)
            self._events.append((topic, frame, _JsonTemplate(_decoded(frame.first[BODY]), EVENT)))
        events = [(frame.first, event.first) for _, frame, event in self._events]
        if self._fill(self._text.first, payload_json, events) != message:
            raise ValueError("the template does not reproduce its message")

    def message(
        self,
        job_id: str,
        payload_json: str,
        *,
        argsrepr: str,
        kwargsrepr: str,
        submitted_at: float,
        clock: int | None,
        trace: Mapping[str, str] | None = None,
    ) -> Message:
        """Return the message of another job.

        Flower shows `argsrepr` and `kwargsrepr`. `clock` is Celery's logical clock; without it the message has no
        event. `trace` has the values of the trace headers.
        """
        values = {
            ID: quoted(job_id),
            TAG: _new_tag(),
            ARGS: quoted(argsrepr),
            KWARGS: quoted(kwargsrepr),
            AT: json.dumps(submitted_at),
            **{name: quoted(value) for name, value in (trace or {}).items()},
        }
        if clock is None:
            return self._fill(values, payload_json, [])
        now = {**values, NOW: repr(time.time()), CLOCK: str(clock)}
        return self._fill(values, payload_json, [({TAG: _new_tag()}, now) for _ in self._events])

    def _fill(
        self,
        values: Mapping[str, str],
        payload_json: str,
        values_of_events: Iterable[tuple[Mapping[str, str], Mapping[str, str]]],
    ) -> Message:
        text = self._text.fill({**values, BODY: _encoded(payload_json[:-1] + self._rest_of_body)})
        events = tuple(
            (topic, frame.fill({**of_frame, BODY: _encoded(event.fill(of_event))}))
            for (topic, frame, event), (of_frame, of_event) in zip(self._events, values_of_events, strict=False)
        )
        return Message(self._key, text, events)


def _new_tag() -> str:
    """A delivery tag: kombu accepts any text that no other message has."""
    return f'"{os.urandom(16).hex()}"'


def _decoded(body: str) -> str:
    return base64.b64decode(json.loads(body)).decode()


def _encoded(text: str) -> str:
    return f'"{base64.b64encode(text.encode()).decode()}"'


class Templates:
    """Templates by what their messages have in common."""

    LIMIT = 256  # of a few KiB each: more than the tasks, queues and priorities that a producer uses

    def __init__(self) -> None:
        self._templates: dict[Hashable, Template | None] = {}

    def get(self, common: Hashable) -> Template | None:
        return self._templates.get(common)

    def learn(self, common: Hashable, message: Message, payload_json: str, trace_headers: Iterable[str] = ()) -> None:
        """Make a template of a message. If that is not possible, it is not tried again."""
        if common in self._templates or len(self._templates) >= self.LIMIT:
            return
        try:
            self._templates[common] = Template(message, payload_json, trace_headers)
        except (KeyError, TypeError, ValueError):
            self._templates[common] = None
