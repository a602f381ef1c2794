"""What a response is asked: its items after the context of the previous one, or the whole conversation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cellama.api.http.errors import ApiError
from cellama.api.http.parsing import ParsedRequest
from cellama.api.openai.responses.items import messages_of
from cellama.api.openai.responses.record import ResponseRecord
from cellama.tasks.contract.json_values import shorten

from .reading import Standing, look
from .store import ResponseStore

MAX_TURNS = 200  # responses that one conversation is built from
_OF_THE_CONTEXT = ("cache_scope", "adapters", "tools", "template_args", "enable_thinking")
_FIELD = "previous_response_id"


@dataclass(frozen=True, slots=True)
class Previous:
    """A response that another one follows. `has_context` says whether Redis has the tokens of its context, still."""

    record: ResponseRecord
    standing: Standing
    has_context: bool = False

    def key_for(
        self, model: str, params: dict[str, Any], instructions: str | None, items: list[dict[str, Any]]
    ) -> str | None:
        """The `parent_key` of what follows, if that would read the very same context. Only a user's words follow one:
        many chat templates refuse answers of tools without their calls, or a system message in the midst."""
        mine, alike = self.record, self.has_context and self.standing.response["status"] == "completed"
        alike &= mine.model == model and mine.shown["instructions"] == instructions
        alike &= items[0].get("role") == "user"
        alike &= all(mine.params.get(name) == params.get(name) for name in _OF_THE_CONTEXT)
        return self.standing.finish_key if alike else None


async def previous_of(parsed: ParsedRequest, records: ResponseStore) -> Previous | None:
    """The response that the body names. Raises ApiError."""
    wanted = parsed.body.get(_FIELD)
    if wanted is None:
        return None
    if not isinstance(wanted, str):
        raise ApiError(400, f"{_FIELD} is {shorten(wanted)}; it must be the id of a response", param=_FIELD)
    found = await _ended(parsed, records, wanted)
    return replace(found, has_context=await records.has_context(found.standing.finish_key))


async def _ended(parsed: ParsedRequest, records: ResponseStore, response_id: str) -> Previous:
    try:
        record = await records.read(response_id, parsed.caller)
        standing = await look(parsed.gateway, record)
    except ApiError as error:
        if error.status != 404:
            raise
        told = f"{_FIELD}: {error.message}; send the whole conversation as input"
        raise ApiError(404, told, code="previous_response_not_found", param=_FIELD) from None
    if not standing.has_ended or standing.response["status"] == "failed":
        status = standing.response["status"]
        raise ApiError(
            400, f"{_FIELD} is {response_id!r}, which is {status}; go on after one that has ended well", param=_FIELD
        )
    return Previous(record, standing)


async def messages_for(parsed: ParsedRequest, records: ResponseStore, record: ResponseRecord) -> list[dict[str, Any]]:
    """The messages of the job. Raises ApiError."""
    items = list(record.items)
    if record.parent_key is not None:
        return messages_of(items)
    at, num_turns = record.previous, 0
    while at is not None:
        num_turns += 1
        if num_turns > MAX_TURNS:
            raise ApiError(
                400,
                f"more than {MAX_TURNS} responses come before this one, and instructions, tools or model are others "
                "now: send the conversation as input",
                param=_FIELD,
            )
        previous = await _ended(parsed, records, at)
        items = [*previous.record.items, *previous.standing.response["output"], *items]
        at = previous.record.previous
    return _with_instructions(record.shown["instructions"], messages_of(items))


def _with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One system message at the head: many chat templates take no second one."""
    if instructions is None:
        return messages
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{instructions}\n\n{messages[0]['content']}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]
