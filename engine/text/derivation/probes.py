"""Define conversations that each differ in one respect, so that rendering them reveals a template's markup.

The words in these conversations don't occur in templates, so all other rendered text comes from the template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

USER, CONTENT, REASON, RESULT = "Zuserq", "Zcontentq", "Zreasonq", "Zresultq"
NAMES = ("zfirstq", "zsecondq", "zthirdq")
KEYS = ("zkeyaq", "zkeybq")
VALUES = ("zvalueaq", "zvaluebq")
IDS = ("zida0call", "zidb1call", "zidc2call")  # nine letters and digits, which some templates require
NUMBER = 90417
NAMED_ID = "functions.{name}:{index}"  # id for templates that write it instead of the name

Probe = dict[str, Any]
RenderedProbes = Mapping[str, str | None]

SWITCHES = ("enable_thinking", "thinking")  # template variables that enable or disable reasoning
_THINKING, _NOT_THINKING = dict.fromkeys(SWITCHES, True), dict.fromkeys(SWITCHES, False)
_TEXT = {"type": "string", "description": "Zmeansq."}
_PARAMETERS = {"type": "object", "properties": dict.fromkeys(KEYS, _TEXT), "required": [KEYS[0]]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Zdoesq.", "parameters": _PARAMETERS}}
    for name in NAMES
]
_BOTH_ARGUMENTS = dict(zip(KEYS, VALUES, strict=True))
CALLS: dict[str, Sequence[dict[str, Any]]] = {  # arguments of the calls in an assistant's turn
    "call": [_BOTH_ARGUMENTS],
    "calls": [_BOTH_ARGUMENTS, {KEYS[0]: VALUES[0]}],
    "three": [_BOTH_ARGUMENTS, {KEYS[0]: VALUES[0]}, {KEYS[1]: VALUES[1]}],
    "number": [{KEYS[0]: VALUES[0], KEYS[1]: NUMBER}],
    "nested": [{KEYS[0]: VALUES[0], KEYS[1]: {"zinnerq": [VALUES[1], NUMBER]}}],
}
ARGUMENT_FORMATS = ("object", "text")  # formats of the arguments: some templates expect JSON text, others an object
ENDINGS = ("last", "answered")  # some templates require results after a call, or write the last turn differently


def probe_name(turn: str, arguments_format: str, ids: str, ending: str) -> str:
    return f"{turn} {arguments_format} {ids} {ending}"


def probes(for_template: Callable[..., dict[str, Any]]) -> dict[str, Probe]:
    """Return all conversations, keyed by name.

    Each conversation contains messages prepared by `for_template` and the template variables.
    """
    user = {"role": "user", "content": USER}
    reply = {"role": "assistant", "content": CONTENT}
    reasoned = {**reply, "reasoning": REASON}
    found = {
        "start": _probe([user], add_generation_prompt=True),
        "start thinking": _probe([user], add_generation_prompt=True, **_THINKING),
        "start without thinking": _probe([user], add_generation_prompt=True, **_NOT_THINKING),
        "reply last": _probe([user, reply], tools=TOOLS),
        "reply answered": _probe([user, reply, user], tools=TOOLS),
        "reply without tools": _probe([user, reply]),
        "reasoning": _probe([user, reasoned]),
        "reasoning enabled": _probe([user, reasoned], **_THINKING),
    }
    for ids in ("ids", "named"):
        for name, arguments in CALLS.items():
            for arguments_format in ARGUMENT_FORMATS:
                for ending in ENDINGS:
                    calls = [_call(i, values, ids) for i, values in enumerate(arguments)]
                    found[probe_name(name, arguments_format, ids, ending)] = _call_probe(
                        user, calls, arguments_format, ending
                    )
    for arguments_format in ARGUMENT_FORMATS:
        found[f"reasoning call {arguments_format}"] = _call_probe(
            user, [_call(0, _BOTH_ARGUMENTS, "ids")], arguments_format, "answered", reasoning=REASON
        )
    for probe in found.values():
        as_text = probe.pop("arguments_format") == "text"
        probe["messages"] = [for_template(message, arguments_as_text=as_text) for message in probe["messages"]]
    return found


def _call_probe(user: Any, calls: list[Any], arguments_format: str, ending: str, **more: Any) -> Probe:
    turn = {"role": "assistant", "content": "", "tool_calls": calls, **more}
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": RESULT}
        for call in calls
    ]
    return {
        **_probe([user, turn, *(results if ending == "answered" else [])], tools=TOOLS),
        "arguments_format": arguments_format,
    }


def _probe(messages: list[Any], **variables: Any) -> Probe:
    return {
        "messages": messages,
        "variables": {"add_generation_prompt": False, **variables},
        "arguments_format": ARGUMENT_FORMATS[0],
    }


def _call(at: int, arguments: Mapping[str, Any], ids: str) -> dict[str, Any]:
    name = NAMES[at]
    call_id = IDS[at] if ids == "ids" else NAMED_ID.format(name=name, index=at)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
