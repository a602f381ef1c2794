"""Convert Anthropic system prompts and conversation turns into job messages.

The functions in this module raise InvalidJob for invalid conversations.
Identical turns always become identical messages, so a reasoning signature is still valid when a client sends it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import check_text, shorten

SEPARATOR = "\n\n"  # between two texts of one turn
FAILED = "Error: "  # before the output of a failed tool, because templates have no field for failures
BILLING = "x-anthropic-billing-header:"  # a line of Anthropic's coding client that differs in each request
_UNSUPPORTED = {
    "image": "models can only process text; remove images",
    "document": "models can only process text; send the document as text",
    "redacted_thinking": "only Anthropic's models can read it; leave it out",
}


def messages_of(system: Any, turns: Any) -> list[dict[str, Any]]:
    """Return all messages, starting with the system message."""
    if not isinstance(turns, list) or not turns:
        raise InvalidJob(f"messages is {shorten(turns)}; it must be a list of at least one message")
    text = _system_of(system)
    messages = [{"role": "system", "content": text}] if text else []
    for index, turn in enumerate(turns):
        messages += _turn(turn, f"messages.{index}")
    return messages


def _system_of(system: Any) -> str:
    """Return the system prompt without the billing line, which would prevent requests from sharing a prefix."""
    if system is None:
        return ""
    texts = [_text(block, f"system.{index}") for index, block in enumerate(_blocks(system, "system"))]
    return SEPARATOR.join(filter(None, map(_without_billing, texts)))


def _without_billing(text: str) -> str:
    if not text.startswith(BILLING):
        return text
    return text.partition("\n")[2].lstrip("\n")


def _turn(turn: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(turn, dict):
        raise InvalidJob(f"{where} is {shorten(turn)}; it must be an object with role and content")
    unknown = turn.keys() - {"role", "content"}
    if unknown:
        raise InvalidJob(f"{where} has {shorten(min(unknown))}; a message may only have role and content")
    role, content = turn.get("role"), turn.get("content")
    readers = {"user": _user, "assistant": _assistant, "system": _system}
    if not isinstance(role, str) or role not in readers:
        raise InvalidJob(f"{where}.role is {shorten(role)}; it must be user, assistant or system")
    return readers[role](_blocks(content, f"{where}.content"), f"{where}.content")


def _blocks(content: Any, where: str) -> list[Mapping[str, Any]]:
    """Return the blocks of a message's content. A string becomes one block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidJob(f"{where} is {shorten(content)}; it must be a string or a list of blocks")
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise InvalidJob(f"{where}.{index} is {shorten(block)}; it must be a block, that is, an object with a type")
    return content


def _user(blocks: list[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return one message per tool result, and user messages for the text between tool results."""
    messages: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            messages.append(_tool_result(block, f"{where}.{index}"))
            continue
        text = _text(block, f"{where}.{index}")
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += SEPARATOR + text
        else:
            messages.append({"role": "user", "content": text})
    if not messages:
        raise InvalidJob(f"{where} is empty; a user message must have at least one block")
    return messages


def _system(blocks: list[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    texts = [_text(block, f"{where}.{index}") for index, block in enumerate(blocks)]
    return [{"role": "system", "content": SEPARATOR.join(texts)}]


def _tool_result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content")
    parts = [] if content is None else _blocks(content, f"{where}.content")
    text = SEPARATOR.join(_text(part, f"{where}.content.{index}") for index, part in enumerate(parts))
    failed = block.get("is_error")
    if failed not in (None, True, False):
        raise InvalidJob(f"{where}.is_error is {shorten(failed)}; it must be true or false")
    call_id = _string(block, "tool_use_id", where)
    return {"role": "tool", "tool_call_id": call_id, "content": FAILED + text if failed else text}


def _assistant(blocks: list[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return a single message, because chat templates have fixed positions for reasoning, text and calls."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    reasoning: dict[str, Any] = {}
    for index, block in enumerate(blocks):
        here = f"{where}.{index}"
        if block.get("type") == "tool_use":
            calls.append(_call(block, here))
        elif block.get("type") == "thinking":
            if reasoning:
                raise InvalidJob(f"{here} is a second thinking block, but a message may only have one; remove it")
            reasoning = _reasoning(block, here)
        else:
            texts.append(_text(block, here))
    message = {"role": "assistant", "content": SEPARATOR.join(filter(None, texts)), **reasoning}
    return [{**message, "tool_calls": calls} if calls else message]


def _reasoning(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the reasoning and its signature if they are not empty.

    Answers without reasoning don't have a signature.
    """
    reasoning = {"reasoning": _string(block, "thinking", where)}
    if block.get("signature") is not None:
        reasoning["signature"] = _string(block, "signature", where)
    return {name: value for name, value in reasoning.items() if value}


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidJob(f"{where}.input is {shorten(arguments)}; it must be an object")
    function = {"name": _string(block, "name", where), "arguments": arguments}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _text(block: Mapping[str, Any], where: str) -> str:
    kind = block.get("type")
    if kind != "text":
        reason = _UNSUPPORTED.get(kind, "") if isinstance(kind, str) else ""
        raise InvalidJob(f"{where}.type is {shorten(kind)}: {reason or 'it is not supported; send it as text'}")
    return _string(block, "text", where)


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidJob(f"{where}.{name} is {shorten(value)}; it must be a string")
    try:
        return check_text(value)
    except ValueError as error:
        raise InvalidJob(f"{where}.{name} is {shorten(value)}: {error}") from None
