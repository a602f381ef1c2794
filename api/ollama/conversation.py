"""Convert Ollama's messages into job messages.

The functions in this module raise InvalidJob for invalid conversations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import shorten

_MEMBERS = {  # Ollama's name → name in messages of jobs. Other members are ignored, as in Ollama
    "role": "role",
    "content": "content",
    "thinking": "reasoning",
    "tool_call_id": "tool_call_id",
    "tool_name": "name",
}


def messages_of(messages: list[Any]) -> list[Any]:
    """Return a job's messages.

    Members of the wrong type are left unchanged because the payload rejects them. Calls and results in Ollama's format
    often lack ids, so they are assigned the ids that chat templates need.
    """
    ids = _CallIds()
    return [_message(message, f"messages.{index}", ids) for index, message in enumerate(messages)]


class _CallIds:
    """Assigns ids to calls without an id, and to the results of these calls.

    Each id depends only on the number of preceding calls, so a growing conversation keeps its ids. Ids have nine
    characters because some chat templates accept no other length.
    """

    def __init__(self) -> None:
        self._num_calls = 0
        self._open: list[tuple[str, Any]] = []  # id and name of each call in the last reply that has no result yet

    def of_calls(self, calls: list[Any]) -> list[Any]:
        """Return a reply's calls with their ids."""
        self._open = []
        return [self._call(call) for call in calls]

    def _call(self, call: Any) -> Any:
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            return call
        self._num_calls += 1
        call_id = call.get("id") or f"call{self._num_calls:05d}"
        function = {name: call["function"][name] for name in ("name", "arguments") if name in call["function"]}
        self._open.append((call_id, function.get("name")))
        return {"id": call_id, "type": "function", "function": function}

    def of_result(self, call_id: Any, name: Any) -> Any:
        """Return the id of the call that a result belongs to.

        If the result has no id, it belongs to the first open call with the same name, or to the first open call if no
        name matches.
        """
        candidates = [one for one in self._open if call_id in (None, one[0])]
        found = next((one for one in candidates if one[1] == name), next(iter(candidates), None))
        if found is None:
            return call_id
        self._open.remove(found)
        return found[0]


def _message(message: Any, where: str, ids: _CallIds) -> Any:
    if not isinstance(message, dict):
        return message
    if message.get("images"):
        raise InvalidJob(f"{where}.images is {shorten(message['images'])}: models can only process text; remove images")
    made = {to: message[name] for name, to in _MEMBERS.items() if message.get(name) is not None}
    if isinstance(made.get("role"), str):
        made["role"] = made["role"].lower()
    if made.get("role") == "tool":
        call_id = ids.of_result(made.pop("tool_call_id", None), made.get("name"))
        made.setdefault("content", "")
        return made if call_id is None else {**made, "tool_call_id": call_id}
    if made.get("reasoning") == "":
        del made["reasoning"]
    calls = message.get("tool_calls")
    if calls:
        made["tool_calls"] = ids.of_calls(calls) if isinstance(calls, list) else calls
    return made
