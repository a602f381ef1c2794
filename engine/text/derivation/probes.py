"""Conversations that differ in one thing, for a template to render: the differences show its markup. Pure.

All words in such a conversation occur nowhere else, so everything else is the template's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

USER, CONTENT, REASON, RESULT = "Zuserq", "Zcontentq", "Zreasonq", "Zresultq"
NAMES = ("zfirstq", "zsecondq", "zthirdq")
KEYS = ("zkeyaq", "zkeybq")
VALUES = ("zvalueaq", "zvaluebq")
IDS = ("zida0call", "zidb1call", "zidc2call")  # nine letters and digits, because some templates demand that
NUMBER = 90417
NAMED_ID = "functions.{name}:{index}"  # for templates that write the id in place of the name

Probe = dict[str, Any]
Rendered = Mapping[str, str | None]

SWITCHES = ("enable_thinking", "thinking")  # variables by which templates turn reasoning on and off
_THINKING, _NOT_THINKING = dict.fromkeys(SWITCHES, True), dict.fromkeys(SWITCHES, False)
_TEXT = {"type": "string", "description": "Zmeansq."}
_PARAMETERS = {"type": "object", "properties": dict.fromkeys(KEYS, _TEXT), "required": [KEYS[0]]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Zdoesq.", "parameters": _PARAMETERS}}
    for name in NAMES
]
_BOTH = dict(zip(KEYS, VALUES, strict=True))
CALLS: dict[str, Sequence[dict[str, Any]]] = {  # of an assistant's turn
    "call": [_BOTH],
    "calls": [_BOTH, {KEYS[0]: VALUES[0]}],
    "three": [_BOTH, {KEYS[0]: VALUES[0]}, {KEYS[1]: VALUES[1]}],
    "number": [{KEYS[0]: VALUES[0], KEYS[1]: NUMBER}],
    "nested": [{KEYS[0]: VALUES[0], KEYS[1]: {"zinnerq": [VALUES[1], NUMBER]}}],
}
FORMS = ("object", "text")  # of arguments: some templates take them as JSON text, others as an object
ENDS = ("last", "answered")  # some templates demand results after a call, or write the last turn in another way


def probe_name(turn: str, form: str, ids: str, end: str) -> str:
    return f"{turn} {form} {ids} {end}"


def probes(for_template: Callable[..., dict[str, Any]]) -> dict[str, Probe]:
    """Return all conversations by name: messages, prepared by `for_template`, and variables."""
    user = {"role": "user", "content": USER}
    said = {"role": "assistant", "content": CONTENT}
    thought = {**said, "reasoning": REASON}
    found = {
        "begun": _probe([user], add_generation_prompt=True),
        "begun thinking": _probe([user], add_generation_prompt=True, **_THINKING),
        "begun not thinking": _probe([user], add_generation_prompt=True, **_NOT_THINKING),
        "asked": _probe([user]),
        "said last": _probe([user, said], tools=TOOLS),
        "said answered": _probe([user, said, user], tools=TOOLS),
        "said alone": _probe([user, said]),
        "thought": _probe([user, thought]),
        "thought thinking": _probe([user, thought], **_THINKING),
    }
    for ids in ("ids", "named"):
        for name, arguments in CALLS.items():
            for form in FORMS:
                for end in ENDS:
                    calls = [_call(i, values, ids) for i, values in enumerate(arguments)]
                    found[probe_name(name, form, ids, end)] = _asked(user, calls, form, end)
    for form in FORMS:
        found[f"thought call {form}"] = _asked(user, [_call(0, _BOTH, "ids")], form, "answered", reasoning=REASON)
    for probe in found.values():
        as_text = probe.pop("form") == "text"
        probe["messages"] = [for_template(message, arguments_as_text=as_text) for message in probe["messages"]]
    return found


def _asked(user: Any, calls: list[Any], form: str, end: str, **more: Any) -> Probe:
    turn = {"role": "assistant", "content": "", "tool_calls": calls, **more}
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": RESULT}
        for call in calls
    ]
    return {**_probe([user, turn, *(results if end == "answered" else [])], tools=TOOLS), "form": form}


def _probe(messages: list[Any], **variables: Any) -> Probe:
    return {"messages": messages, "variables": {"add_generation_prompt": False, **variables}, "form": FORMS[0]}


def _call(at: int, arguments: Mapping[str, Any], ids: str) -> dict[str, Any]:
    name = NAMES[at]
    call_id = IDS[at] if ids == "ids" else NAMED_ID.format(name=name, index=at)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
