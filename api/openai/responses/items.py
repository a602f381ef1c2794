"""Convert conversation items into chat messages and into the item list format.

The functions in this module raise InvalidJob for invalid items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import check_text, shorten

from .tools import function_name

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_UNSUPPORTED = ("input_image", "input_file", "input_audio")
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "compaction": "cmp",
}
SUMMARY_PREFIX = "cellama-summary:"  # of a summary in a compaction item. Other servers encrypt theirs
_SUMMARY_HEAD = "Summary of the conversation so far:\n\n"


def items_of(given: Any, response_id: str) -> list[dict[str, Any]]:
    """Return the items of an `input`, each with an id. Items of unknown types are omitted."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise InvalidJob(f"input is {shorten(given)}; it must be a string or a list of items")
    items = [_item(index, item, response_id) for index, item in enumerate(given)]
    known = [item for item in items if item is not None]
    _check_ids(known)
    if not known:
        raise InvalidJob(
            "input is a list without messages; send a string, or items of type message or function_call_output"
        )
    return known


def _check_ids(items: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidJob if an id is repeated. Ids must be unique because each page of the list starts after an id."""
    seen: set[str] = set()
    for item in items:
        if item["id"] in seen:
            raise InvalidJob(f"input is invalid: two items have the id {shorten(item['id'])}; ids must be unique")
        seen.add(item["id"])


def _item(index: int, item: Any, response_id: str) -> dict[str, Any] | None:
    where = f"input[{index}]"
    if not isinstance(item, dict):
        raise InvalidJob(f"{where} is {shorten(item)}; it must be an object")
    kind = item.get("type") or "message"
    if not isinstance(kind, str):
        raise InvalidJob(f"{where}.type is {shorten(kind)}; it must be a string")
    if kind == "item_reference":  # the endpoint replaces references
        raise InvalidJob(f"{where}.type is {kind!r}, which this server does not support; send the item itself")
    if kind not in _PREFIXES:
        return None
    item_id = _text(where, item, "id") if item.get("id") else f"{_PREFIXES[kind]}_{response_id[5:]}_{index}"
    return {"id": item_id, "type": kind} | _READERS[kind](where, item)


def _read_message(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidJob(f"{where}.role is {shorten(role)}; it must be one of {', '.join(_ROLES)}")
    kind = "output_text" if role == "assistant" else "input_text"
    extra: dict[str, Any] = {"annotations": []} if role == "assistant" else {}
    texts = _texts(f"{where}.content", item.get("content"))
    return {"status": "completed", "role": role, "content": [{"type": kind, "text": text, **extra} for text in texts]}


def _read_call(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    namespace = {} if item.get("namespace") is None else {"namespace": _text(where, item, "namespace")}
    members = {name: _text(where, item, name) for name in ("call_id", "name", "arguments")}
    return {**members, **namespace, "status": "completed"}


def _read_output(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    output = "".join(_texts(f"{where}.output", item.get("output")))
    return {"call_id": _text(where, item, "call_id"), "output": output, "status": "completed"}


def _read_reasoning(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reasoning, with its signature (`encrypted_content`) if it has one.

    The reasoning's summary is ignored.
    """
    texts = _texts(f"{where}.content", item["content"]) if item.get("content") else []
    signature = (
        {} if item.get("encrypted_content") is None else {"encrypted_content": _text(where, item, "encrypted_content")}
    )
    return {"summary": [], "content": [{"type": "reasoning_text", "text": text} for text in texts], **signature}


def _read_compaction(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    content = _text(where, item, "encrypted_content")
    if not content.startswith(SUMMARY_PREFIX):
        raise InvalidJob(
            f"{where}.encrypted_content is {shorten(content)}, which another server created; send the conversation "
            "itself, or compact it here with /v1/responses/compact"
        )
    return {"encrypted_content": content}


_READERS = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_output,
    "reasoning": _read_reasoning,
    "compaction": _read_compaction,
}


def _text(where: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidJob(f"{where}.{name} is {shorten(value)}; it must be a string")
    return _checked(f"{where}.{name}", value)


def _checked(where: str, text: str) -> str:
    try:
        return check_text(text)
    except ValueError as error:
        raise InvalidJob(f"{where} is {shorten(text)}: {error}") from None


def _texts(where: str, content: Any) -> list[str]:
    """Return the text parts of a message's content, which is a string or a list of parts.

    Refusals are treated as text.
    """
    if isinstance(content, str):
        return [_checked(where, content)]
    if not isinstance(content, list):
        raise InvalidJob(f"{where} is {shorten(content)}; it must be a string or a list of parts")
    return [_part(f"{where}[{index}]", part) for index, part in enumerate(content)]


def _part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXTS:
        return _text(where, part, "text")
    if kind == "refusal":
        return _text(where, part, "refusal")
    if kind in _UNSUPPORTED:
        raise InvalidJob(f"{where}.type is {kind!r}, but models can only process text; remove images, audio and files")
    raise InvalidJob(f"{where} is {shorten(part)}; its type must be input_text or output_text")


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat's messages.

    Consecutive reasoning, text and calls become one assistant message. Reasoning is sent without its signature, which
    is valid only for the original messages. The new messages differ from the original messages, because instructions
    apply to one response only.
    """
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's message that the next item may extend
    for item in items:
        if item["type"] in _WHOLE or item.get("role", "assistant") != "assistant":
            turn = None
            messages.append(_WHOLE.get(item["type"], _message)(item))
            continue
        if turn is None or _starts_turn(turn, item):
            turn = {"role": "assistant"}
            messages.append(turn)
        _add(turn, item)
    return [message for message in messages if len(message) > 1 and _is_complete(message)]


def _tool_result(item: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}


def _summary(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary as a user message, because the model would continue a final assistant message."""
    summary = item["encrypted_content"].removeprefix(SUMMARY_PREFIX)
    return {"role": "user", "content": _SUMMARY_HEAD + summary}


_WHOLE = {"function_call_output": _tool_result, "compaction": _summary}  # items that are messages of their own


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": _ROLES[item["role"]], "content": _joined(item)}


def _joined(item: Mapping[str, Any]) -> str:
    return "".join(part["text"] for part in item["content"])


def _starts_turn(turn: Mapping[str, Any], item: Mapping[str, Any]) -> bool:
    """Return whether an item starts a new message.

    In a message, reasoning comes first, followed by text and calls. Text after a call belongs to the same message.
    """
    if item["type"] == "reasoning":
        return len(turn) > 1
    return item["type"] == "message" and "content" in turn and "tool_calls" not in turn


def _add(turn: dict[str, Any], item: Mapping[str, Any]) -> None:
    if item["type"] == "message":
        turn["content"] = turn.get("content", "") + _joined(item)
    elif item["type"] == "function_call":
        function = {"name": function_name(item.get("namespace"), item["name"]), "arguments": item["arguments"]}
        turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    elif item["content"]:
        turn["reasoning"] = _joined(item)


def _is_complete(message: Mapping[str, Any]) -> bool:
    """Return whether a message is complete. Reasoning without an answer is not complete."""
    return "content" in message or "tool_calls" in message
