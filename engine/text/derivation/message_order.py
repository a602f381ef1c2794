"""Determine the message orders that a chat template can render, and rearrange other conversations.

Clients may send several system messages, system messages in the middle of a conversation, or several messages of the
same role in a row. Many templates reject or drop such messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .probes import CONTENT, USER, Probe, RenderedProbes

SEPARATOR = "\n\n"  # separator between the texts of merged messages
_SYSTEMS, _LATER_USER, _LATER_CONTENT = ("Zrulesq", "Zmorerulesq"), "Zlateruserq", "Zlatercontentq"
_SYSTEM, _LATER_SYSTEM = ({"role": "system", "content": text} for text in _SYSTEMS)
_USER, _NEXT_USER = ({"role": "user", "content": text} for text in (USER, _LATER_USER))
_REPLY, _NEXT_REPLY = ({"role": "assistant", "content": text} for text in (CONTENT, _LATER_CONTENT))
_FIRST_SYSTEM = {"system first": [_SYSTEM, _USER]}
_MORE_SYSTEMS = {
    "two systems": [_SYSTEM, _LATER_SYSTEM, _USER],
    "system after the user": [_USER, _LATER_SYSTEM],
    "system between turns": [_SYSTEM, _USER, _REPLY, _LATER_SYSTEM, _NEXT_USER],
    "only a system between turns": [_USER, _REPLY, _LATER_SYSTEM, _NEXT_USER],
}
_REPEATED_ROLES = {"two users": [_USER, _NEXT_USER], "two replies": [_USER, _REPLY, _NEXT_REPLY, _NEXT_USER]}

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MessageOrder:
    """The kinds of conversations that a template renders completely and in order."""

    first_system: bool  # a system message at the start
    more_systems: bool  # several system messages, at any position
    repeated_roles: bool  # consecutive user messages, or consecutive assistant messages


def order_probes(for_template: Callable[[Message], dict[str, Any]]) -> dict[str, Probe]:
    """Return named conversations that show which message orders a template supports.

    `for_template` prepares each message.
    """
    conversations = {**_FIRST_SYSTEM, **_MORE_SYSTEMS, **_REPEATED_ROLES}
    return {
        name: {
            "messages": [for_template(message) for message in messages],
            "variables": {"add_generation_prompt": False},
        }
        for name, messages in conversations.items()
    }


def derive_order(rendered: RenderedProbes) -> MessageOrder:
    """Return the supported message orders, based on the rendered conversations of `order_probes`."""

    def renders_all(conversations: Mapping[str, list[dict[str, str]]]) -> bool:
        return all(_is_complete(rendered.get(name), messages) for name, messages in conversations.items())

    return MessageOrder(renders_all(_FIRST_SYSTEM), renders_all(_MORE_SYSTEMS), renders_all(_REPEATED_ROLES))


def _is_complete(prompt: str | None, messages: list[dict[str, str]]) -> bool:
    """Return True if the prompt contains the content of each message exactly once and in this order."""
    contents = [message["content"] for message in messages]
    if prompt is None or any(prompt.count(content) != 1 for content in contents):
        return False
    positions = [prompt.index(content) for content in contents]
    return positions == sorted(positions)


def is_plain(messages: Sequence[Message]) -> bool:
    """Return True if every template renders the messages as they are.

    Every template can render messages if there are no system messages, and no consecutive messages of the same role
    except tool messages.
    """
    roles = [message.get("role") for message in messages]
    return "system" not in roles and all(role == "tool" or role != following for role, following in pairwise(roles))


def arrange(messages: Sequence[Message], order: MessageOrder) -> list[Message]:
    """Return the messages in an order that the template supports. Each message's content is kept.

    System messages at a position that the template does not support are merged into the first system message, or into
    the first user message. Consecutive messages of the same role are merged if the template requires alternating roles.
    """
    arranged = list(messages)
    if not order.more_systems:
        systems = [message for message in arranged if message.get("role") == "system"]
        others = [message for message in arranged if message.get("role") != "system"]
        arranged = [_joined(systems), *others] if systems else others
    if not order.first_system and arranged and arranged[0].get("role") == "system":
        arranged = _with_system_in_user(arranged[0], arranged[1:])
    return arranged if order.repeated_roles else _alternating(arranged)


def _with_system_in_user(system: Message, others: list[Message]) -> list[Message]:
    as_user = {**system, "role": "user"}
    if not others or others[0].get("role") != "user":
        return [as_user, *others]
    return [_joined([as_user, others[0]]), *others[1:]]


def _alternating(messages: Sequence[Message]) -> list[Message]:
    runs: list[list[Message]] = []
    for message in messages:
        if runs and message.get("role") in ("user", "assistant") and runs[-1][0].get("role") == message["role"]:
            runs[-1].append(message)
        else:
            runs.append([message])
    return [_joined(run) for run in runs]


def _joined(run: Sequence[Message]) -> Message:
    """Merge consecutive messages into one message with all of their content and tool calls."""
    if len(run) == 1:
        return run[0]
    joined = {name: value for message in run for name, value in message.items()}
    joined["content"] = SEPARATOR.join(text for message in run if (text := message.get("content")))
    if calls := [call for message in run for call in message.get("tool_calls") or ()]:
        joined["tool_calls"] = calls
    return joined
