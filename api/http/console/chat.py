"""Chat with a model.

Chats are stored in Redis, and answers in progress are stored in their jobs' journals, so both survive restarts.
"""

from __future__ import annotations

import contextlib
import math
import re
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from cellama.api.http.completions import CompletionRequest, parse_completion
from cellama.api.http.context import charge
from cellama.api.http.errors import ApiError, not_found, of_code, of_job
from cellama.api.http.gateway import Gateway, gateway_of
from cellama.api.http.parsing import ParsedRequest, read_of
from cellama.api.http.running import RESULT_S, RunningJobs
from cellama.api.http.sse import EventStream, frame, with_errors
from cellama.api.openai.parameters import CHAT
from cellama.config.settings import explain
from cellama.tasks.contract.errors import InvalidJob, JobError, StreamTrimmed, UnknownJob
from cellama.tasks.contract.events import is_terminal
from cellama.tasks.contract.json_values import shorten, valid_text
from cellama.tasks.contract.kinds.chat import TASK_CHAT
from cellama.tasks.contract.names import job_id_of_key
from cellama.tasks.contract.shapes.workers import ModelView

from .chat_store import ChatTurn, ConsoleChat, ConsoleChatStore, TurnStatus
from .rendering import page
from .session import base_of, console_caller
from .visible import visible

CHATS = "/console/chat"
WAIT_NEWS_S = 2.0  # between two reports of the wait for a slot: often enough to see a queue move
_ID = re.compile(r"[0-9a-f]{32}")
_NOTES = {  # finish reason → why the answer ended early, and the remedy
    "length": "The answer has reached the maximum number of tokens. Raise it in the settings, or start a new chat.",
    "cancelled": "You stopped this answer.",
    "timeout": "The job reached its timeout. Retry.",
}
LOST = "Redis has no data of this answer: it has expired, or it was never queued. Retry."


class ConsoleMessage(BaseModel):
    """A message sent by the page. If `retry` is true, the chat's last message is sent again instead of this message."""

    model_config = ConfigDict(extra="forbid")

    text: str = ""
    model: str
    num_turns: int  # that the page shows: if the chat has others, another tab has changed it
    retry: bool = False
    system: str = ""
    temperature: float | None = None  # the payload of the job checks the range
    max_tokens: int | None = None

    def text_for(self, chat: ConsoleChat) -> str:
        """Return the message's text. `chat` is the chat without the new message. Raises ApiError (400 or 409)."""
        if not self.retry and not self.text.strip():
            raise ApiError(400, "text is empty; enter a message", param="text")
        if self.retry and not chat.turns:
            raise ApiError(409, "the chat has no message to send again; enter a message", code="chat_changed")
        return chat.turns[-1].text if self.retry else self.text

    def base(self, chat: ConsoleChat) -> ConsoleChat:
        """Return the chat that the message continues.

        `chat` is the chat without the new message. Raises ApiError (409).
        """
        if chat.running is not None:
            raise ApiError(
                409,
                "an answer in this chat is still being generated; wait until the answer is complete, or stop it",
                code="chat_busy",
            )
        if len(chat.turns) != self.num_turns:
            message = f"the chat has {len(chat.turns)} messages, and this page shows {self.num_turns}; reload the page"
            raise ApiError(409, message, code="chat_changed")
        settings = {"system": self.system, "temperature": self.temperature, "max_tokens": self.max_tokens}
        return (chat.without_last() if self.retry else chat).model_copy(update=settings)

    def body(self, chat: ConsoleChat) -> dict[str, Any]:
        """Return the body of the equivalent chat completion request. `chat` is the chat without the new message."""
        options = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        given = {name: value for name, value in options.items() if value is not None}
        messages = [*self.base(chat).messages(), {"role": "user", "content": self.text_for(chat)}]
        return {"model": self.model, "messages": messages, "stream": True, **given}


class AnswerText:
    """An answer's text, collected from the events of its job."""

    def __init__(self) -> None:
        self._parts: dict[str, list[str]] = {"token": [], "reasoning": []}

    def add(self, event: Mapping[str, Any]) -> None:
        if event["type"] in self._parts:
            self._parts[event["type"]].append(event["text"])

    def turn(self, turn: ChatTurn, status: TurnStatus, note: str, end: Mapping[str, Any]) -> ChatTurn:
        """Return the turn with the collected text, after the job has ended."""
        usage, timings = end.get("usage") or {}, end.get("timings") or {}
        return turn.model_copy(
            update={
                "status": status,
                "note": note,
                "answer": "".join(self._parts["token"]),
                "reasoning": "".join(self._parts["reasoning"]),
                "num_tokens": usage.get("completion_tokens", 0),
                "tokens_per_s": timings.get("generation_rate"),
            }
        )

    def ended(self, turn: ChatTurn, event: Mapping[str, Any]) -> ChatTurn:
        """Return the finished turn, whose status and note depend on its job's terminal event."""
        if event["type"] == "error":
            error = of_code(event["code"], event["message"], retryable=event["retryable"])
            return self.turn(turn, "failed", error.message, event)
        reason = event["finish_reason"]
        return self.turn(turn, "stopped" if reason == "cancelled" else "done", _NOTES.get(reason, ""), event)


async def send(request: Request) -> Response:
    """Handle `POST /console/chat/{id}/messages`, which queues the message's job and returns the turn number."""
    caller = await console_caller(request)
    parsed = await read_of(request, await charge(request, caller))
    message, chat_id = _message(parsed.body), _chat_id(request)
    store = ConsoleChatStore(parsed.gateway.redis, parsed.caller)
    before = await store.read(chat_id) or ConsoleChat(id=chat_id)
    model = await parsed.gateway.find_model(parsed.caller, message.model)
    parsed = replace(parsed, body=message.body(before))
    chat = await _submit(parsed, parse_completion(parsed, CHAT, model), store, message, before)
    return JSONResponse({"num_turns": len(chat.turns), "turn": turn_view(chat.turns[-1])})


async def _submit(
    parsed: ParsedRequest,
    completion: CompletionRequest,
    store: ConsoleChatStore,
    message: ConsoleMessage,
    before: ConsoleChat,
) -> ConsoleChat:
    """Store the turn, then queue its job, and return the chat.

    If the job is rejected, restore the chat from `before`. The turn is stored first so that every running job's answer
    can be found.
    """
    key = f"{before.id} {uuid.uuid4().hex}"
    job_id = job_id_of_key(TASK_CHAT, parsed.scope(), key)
    turn = ChatTurn(text=message.text_for(before), model=completion.model, job_id=job_id)
    async with RunningJobs(parsed, completion.model, completion.tier, names=completion.names) as running:
        await running.admit(completion.num_tokens)
        chat = await store.update(before.id, lambda found: message.base(found).with_turn(turn))
        [call] = completion.calls(parsed.gateway.client)
        try:
            await running.submit(lambda _: call(key))
        except (ApiError, JobError) as error:
            await store.update(before.id, lambda found: before if found == chat else found)
            raise (completion.refusal(error) if isinstance(error, InvalidJob) else error) from None
        running.survives_disconnect = True  # set last, so that a refused message leaves no job behind
    return chat


async def stream(request: Request) -> Response:
    """Handle `GET /console/chat/{id}/stream`, which streams the last answer's events with numbers above `after`."""
    gateway, caller = gateway_of(request), await console_caller(request)
    store = ConsoleChatStore(gateway.redis, caller)
    chat = await _find(request, store)
    if chat.running is None:
        frames = _frame_of_end(chat)
    else:
        frames = _frames(gateway, store, chat, chat.running, _after(request))
    return EventStream(with_errors(frames, _error_frame), frames.aclose)


async def _frame_of_end(chat: ConsoleChat) -> AsyncGenerator[bytes, None]:
    yield _end(chat.turns[-1])


async def _frames(
    gateway: Gateway, store: ConsoleChatStore, chat: ConsoleChat, turn: ChatTurn, after: int
) -> AsyncGenerator[bytes, None]:
    """Yield the frames of an answer in progress.

    The journal is read from its start even if the page has already shown some events, because the whole text is stored
    at the end.
    """
    text, has_started = AnswerText(), False
    try:
        stream = gateway.client.stream(turn.job_id, timeout=math.inf, ping=WAIT_NEWS_S)
        async with aclosing(stream) as events:  # type: ignore[type-var]
            async for event in events:
                text.add(event)
                if event["type"] == "ping":
                    yield frame(await _wait(gateway, turn, has_started))
                elif is_terminal(event):
                    turn = await _settle(store, chat.id, text.ended(turn, event))
                else:
                    has_started = True
                    if event["seq"] > after:
                        yield _news(event)
    except (StreamTrimmed, UnknownJob):
        turn = await _settle(store, chat.id, await _from_result(gateway, turn))
    yield _end(turn)


def _news(event: Mapping[str, Any]) -> bytes:
    shown = visible(event["text"]) if "text" in event else ""
    return frame({"type": event["type"], "seq": event["seq"], "text": shown})


def _end(turn: ChatTurn) -> bytes:
    """Return an answer's last frame.

    The last frame contains the whole text, which replaces the text shown by the page.
    """
    return frame({"type": "end", **turn_view(turn)})


def _error_frame(error: ApiError) -> bytes:
    return frame({"type": "lost", "message": error.message})


async def _wait(gateway: Gateway, turn: ChatTurn, has_started: bool) -> dict[str, Any]:
    """Return the reason why no text is arriving: the job is waiting for a slot or for a worker."""
    text = ""
    with contextlib.suppress(JobError):
        position = await gateway.client.position(turn.job_id)
        if not position.served:
            text = f"No worker serves {turn.model}. The answer continues when one does: start a worker."
        elif position.state == "waiting" and not has_started:
            eta = "" if position.eta_s is None else f", about {position.eta_s:.0f} s"
            text = f"Waiting for a slot: {position.ahead} jobs ahead{eta}."
        elif position.state == "waiting":
            text = "The worker has stopped. The answer continues on another worker."
    return {"type": "wait", "text": text}


async def _settle(store: ConsoleChatStore, chat_id: str, turn: ChatTurn) -> ChatTurn:
    """Store the finished answer, unless it was already stored or the chat has changed."""

    def change(chat: ConsoleChat) -> ConsoleChat:
        running = chat.running
        return chat.with_last(turn) if running is not None and running.job_id == turn.job_id else chat

    await store.update(chat_id, change)
    return turn


async def _from_result(gateway: Gateway, turn: ChatTurn) -> ChatTurn:
    """Build the finished turn from the result of a job whose events have expired."""
    try:
        result: Any = await gateway.client.job(turn.job_id).result(RESULT_S)
    except UnknownJob:
        return AnswerText().turn(turn, "failed", LOST, {})
    except JobError as error:
        return AnswerText().turn(turn, "failed", of_job(error).message, {})
    text, message = AnswerText(), result["message"]
    text.add({"type": "reasoning", "text": message.get("reasoning") or ""})
    text.add({"type": "token", "text": message["content"] or ""})
    return text.ended(turn, {"type": "done", **result})


async def stop(request: Request) -> Response:
    """Handle `POST /console/chat/{id}/stop`, which cancels the answer in progress.

    The text generated so far is kept.
    """
    gateway, caller = gateway_of(request), await console_caller(request)
    chat = await _find(request, ConsoleChatStore(gateway.redis, caller))
    if chat.running is not None:
        await gateway.client.cancel(chat.running.job_id)
    return Response(status_code=204)


async def delete(request: Request) -> Response:
    """Handle `POST /console/chat/{id}/delete`, which stops the answer and deletes the chat."""
    gateway, caller = gateway_of(request), await console_caller(request)
    store = ConsoleChatStore(gateway.redis, caller)
    chat = await _find(request, store)
    if chat.running is not None:
        await gateway.client.cancel(chat.running.job_id)
    await store.delete(chat.id)
    return RedirectResponse(f"{base_of(request)}/chat", status_code=303)


async def show(request: Request) -> Response:
    """Handle `GET /console/chat/{id}`, and `GET /console/chat` for a new chat."""
    gateway, caller = gateway_of(request), await console_caller(request)
    store = ConsoleChatStore(gateway.redis, caller)
    if "id" in request.path_params:
        chat = await _find(request, store)
    else:
        chat = ConsoleChat(id=uuid.uuid4().hex)
    models = [model for model in await gateway.models(caller) if _can_chat(model)]
    return page(
        request,
        "chat.html",
        chat=chat,
        title=visible(chat.title),
        turns=[turn_view(turn) for turn in chat.turns],
        chats=[(entry.id, visible(entry.title)) for entry in await store.list()],
        models=sorted(model["id"] for model in models),
        model=chat.model or next((model["id"] for model in models if model["default"]), ""),
    )


def turn_view(turn: ChatTurn) -> dict[str, Any]:
    """Return a turn's fields for display. Invisible characters in the text are replaced by visible symbols."""
    rate = "" if turn.tokens_per_s is None else f", {turn.tokens_per_s:.0f} tokens/s"
    return {
        "job_id": turn.job_id,
        "text": visible(turn.text),
        "model": turn.model,
        "status": turn.status,
        "answer": visible(turn.answer),
        "reasoning": visible(turn.reasoning),
        "note": visible(turn.note),
        "facts": f"{turn.num_tokens} tokens{rate}" if turn.num_tokens else "",
    }


def _message(body: Mapping[str, Any]) -> ConsoleMessage:
    try:
        message = ConsoleMessage.model_validate(body)
    except ValidationError as error:
        raise ApiError(400, "; ".join(map(explain, error.errors())), code="invalid_request") from None
    texts = {"text": valid_text(message.text), "system": valid_text(message.system)}
    return message.model_copy(update=texts)


def _chat_id(request: Request) -> str:
    chat_id: str = request.path_params["id"]
    if not _ID.fullmatch(chat_id):
        raise not_found("chat", chat_id)
    return chat_id


async def _find(request: Request, store: ConsoleChatStore) -> ConsoleChat:
    """Return the chat whose id is in the path. Raises ApiError (404)."""
    chat = await store.read(_chat_id(request))
    if chat is None:
        raise not_found("chat", _chat_id(request))
    return chat


def _after(request: Request) -> int:
    """Return the number of the last event shown by the page, or -1. Raises ApiError (400)."""
    text = request.query_params.get("after", "-1")
    if not re.fullmatch(r"-1|[0-9]{1,15}", text, re.ASCII):
        raise ApiError(400, f"after is {shorten(text)}; it must be the seq of an event, or -1", param="after")
    return int(text)


def _can_chat(model: ModelView) -> bool:
    return "chat" in model["capabilities"]


ROUTES = (
    Route(CHATS, show, methods=["GET"]),
    Route(CHATS + "/{id}", show, methods=["GET"]),
    Route(CHATS + "/{id}/messages", send, methods=["POST"]),
    Route(CHATS + "/{id}/stream", stream, methods=["GET"]),
    Route(CHATS + "/{id}/stop", stop, methods=["POST"]),
    Route(CHATS + "/{id}/delete", delete, methods=["POST"]),
)
