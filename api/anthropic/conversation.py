"""Anthropic's system prompt and turns → messages of jobs. The same turns give the same messages, so that the signature
of a thought holds when it comes back. Raises InvalidJob."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import check_text, shorten

BETWEEN = "\n\n"  # two texts of one turn
FAILED = "Error: "  # before what a tool said that failed: templates have no place for that
BILLING = "x-anthropic-billing-header:"  # a line that differs in each request of Anthropic's coding client
_UNREAD = {
    "image": "models read text only; images can't be sent",
    "document": "models read text only; send a document as text",
    "redacted_thinking": "only Anthropic's models can read it; leave it out",
}


def messages_of(system: Any, turns: Any) -> list[dict[str, Any]]:
    """All messages, that of the system first."""
    if not isinstance(turns, list) or not turns:
        raise InvalidJob(f"messages is {shorten(turns)}; it must be a list of at least one message")
    text = _system_of(system)
    messages = [{"role": "system", "content": text}] if text else []
    for place, turn in enumerate(turns):
        messages += _turn(turn, f"messages.{place}")
    if messages[-1]["role"] == "assistant":
        raise InvalidJob(
            f"messages.{len(turns) - 1} is the assistant's: a begun answer can't be gone on with; "
            "end with a user's message"
        )
    return messages


def _system_of(system: Any) -> str:
    """Without the billing line: with it no two requests would begin alike."""
    if system is None:
        return ""
    texts = [_text(block, f"system.{place}") for place, block in enumerate(_blocks(system, "system"))]
    return BETWEEN.join(filter(None, map(_without_billing, texts)))


def _without_billing(text: str) -> str:
    if not text.startswith(BILLING):
        return text
    return text.partition("\n")[2].lstrip("\n")


def _turn(turn: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(turn, dict):
        raise InvalidJob(f"{where} is {shorten(turn)}; it must be an object with role and content")
    unknown = turn.keys() - {"role", "content"}
    if unknown:
        raise InvalidJob(f"{where} has {shorten(min(unknown))}; a message has role and content")
    role, content = turn.get("role"), turn.get("content")
    readers = {"user": _user, "assistant": _assistant, "system": _said_by_system}
    if not isinstance(role, str) or role not in readers:
        raise InvalidJob(f"{where}.role is {shorten(role)}; known: user, assistant, system")
    return readers[role](_blocks(content, f"{where}.content"), f"{where}.content")


def _blocks(content: Any, where: str) -> list[Mapping[str, Any]]:
    """A text is a block of its own."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidJob(f"{where} is {shorten(content)}; it must be a text, or a list of blocks")
    for place, block in enumerate(content):
        if not isinstance(block, dict):
            raise InvalidJob(f"{where}.{place} is {shorten(block)}; it must be a block, an object with a type")
    return content


def _user(blocks: list[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """What tools said is a message of its own each; the texts between them are the user's."""
    messages: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            messages.append(_tool_result(block, f"{where}.{place}"))
            continue
        text = _text(block, f"{where}.{place}")
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += BETWEEN + text
        else:
            messages.append({"role": "user", "content": text})
    if not messages:
        raise InvalidJob(f"{where} is empty; a user's message needs a block")
    return messages


def _said_by_system(blocks: list[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    texts = [_text(block, f"{where}.{place}") for place, block in enumerate(blocks)]
    return [{"role": "system", "content": BETWEEN.join(texts)}]


def _tool_result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content")
    parts = [] if content is None else _blocks(content, f"{where}.content")
    text = BETWEEN.join(_text(part, f"{where}.content.{place}") for place, part in enumerate(parts))
    failed = block.get("is_error")
    if failed not in (None, True, False):
        raise InvalidJob(f"{where}.is_error is {shorten(failed)}; it must be true or false")
    call_id = _string(block, "tool_use_id", where)
    return {"role": "tool", "tool_call_id": call_id, "content": FAILED + text if failed else text}


def _assistant(blocks: list[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """One message, whatever the order of its blocks: templates have one for thoughts, text and calls."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thought: dict[str, Any] = {}
    for place, block in enumerate(blocks):
        here = f"{where}.{place}"
        if block.get("type") == "tool_use":
            calls.append(_call(block, here))
        elif block.get("type") == "thinking":
            if thought:
                raise InvalidJob(f"{here} is a second thought; a message has one, before its text and calls")
            thought = _thought(block, here)
        else:
            texts.append(_text(block, here))
    message = {"role": "assistant", "content": BETWEEN.join(filter(None, texts)), **thought}
    return [{**message, "tool_calls": calls} if calls else message]


def _thought(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Empty for one that was left out of the answer. A signature need not be."""
    thought = {"reasoning": _string(block, "thinking", where)}
    if block.get("signature") is not None:
        thought["signature"] = _string(block, "signature", where)
    return {name: value for name, value in thought.items() if value}


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict):
        raise InvalidJob(f"{where}.input is {shorten(given)}; it must be an object")
    function = {"name": _string(block, "name", where), "arguments": given}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _text(block: Mapping[str, Any], where: str) -> str:
    kind = block.get("type")
    if kind != "text":
        why = _UNREAD.get(kind, "") if isinstance(kind, str) else ""
        raise InvalidJob(f"{where}.type is {shorten(kind)}: {why or 'it is not taken here; send it as text'}")
    return _string(block, "text", where)


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidJob(f"{where}.{name} is {shorten(value)}; it must be a text")
    try:
        return check_text(value)
    except ValueError as error:
        raise InvalidJob(f"{where}.{name} is {shorten(value)}: {error}") from None
