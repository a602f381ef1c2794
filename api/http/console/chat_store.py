"""Store the console's chats in Redis, grouped by their owner."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from redis.asyncio import Redis
from redis.exceptions import WatchError

from cellama.api.http.auth import Caller
from cellama.api.http.errors import ApiError
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.keys import console_chat_key, console_chats_key

MAX_CHATS = 100  # of a caller, in a list that fits a page; a new chat replaces the one that was not used for longest
MAX_CHAT_BYTES = 1 << 20  # more text than any bundled context has, so that all chats of a caller fit into 100 MiB
CHAT_TTL_S = 30 * 86_400  # after the last message, as for the files of batches
TITLE_CHARS = 60
_DATA, _TITLE = "data", "title"  # fields of a chat's hash; the list of chats reads only the title

TurnStatus = Literal["running", "done", "stopped", "failed"]


class ChatTurn(BaseModel):
    """The caller's message and the model's answer. `note` explains why the answer ended early or failed."""

    model_config = ConfigDict(frozen=True)

    text: str
    model: str
    job_id: str
    status: TurnStatus = "running"
    answer: str = ""
    reasoning: str = ""
    note: str = ""
    num_tokens: int = 0
    tokens_per_s: float | None = None


class ConsoleChat(BaseModel):
    """A chat with its settings and all turns, oldest first. Only the last turn can be running."""

    model_config = ConfigDict(frozen=True)

    id: str
    turns: tuple[ChatTurn, ...] = ()
    model: str = ""
    system: str = ""
    temperature: float | None = None
    max_tokens: int | None = None

    @property
    def title(self) -> str:
        """The chat's title, which is the beginning of its first message without line breaks."""
        words = " ".join(self.turns[0].text.split()) if self.turns else ""
        return words if len(words) <= TITLE_CHARS else f"{words[: TITLE_CHARS - 1]}…"

    @property
    def running(self) -> ChatTurn | None:
        """The turn whose answer is still being generated, or None."""
        return self.turns[-1] if self.turns and self.turns[-1].status == "running" else None

    def messages(self) -> Iterator[dict[str, str]]:
        """Yield the messages for the model. Turns without an answer are omitted."""
        if self.system:
            yield {"role": "system", "content": self.system}
        for turn in self.turns:
            if turn.answer:
                yield {"role": "user", "content": turn.text}
                yield {"role": "assistant", "content": turn.answer}

    def with_turn(self, turn: ChatTurn) -> ConsoleChat:
        """Return the chat with a turn added. Raises ApiError (413) if the chat becomes too large."""
        chat = self.model_copy(update={"turns": (*self.turns, turn), "model": turn.model})
        if (num_bytes := len(chat.model_dump_json().encode())) > MAX_CHAT_BYTES:
            message = f"the chat would have {num_bytes} bytes, and the limit is {MAX_CHAT_BYTES}; start a new chat"
            raise ApiError(413, message, code="chat_too_large")
        return chat

    def with_last(self, turn: ChatTurn) -> ConsoleChat:
        """Return the chat with its last turn replaced."""
        return self.model_copy(update={"turns": (*self.turns[:-1], turn)})

    def without_last(self) -> ConsoleChat:
        return self.model_copy(update={"turns": self.turns[:-1]})


class ChatEntry(BaseModel):
    """An entry in the list of chats."""

    id: str
    title: str
    changed_at: float  # Unix seconds


class ConsoleChatStore:
    """Stores the chats of one caller. All methods may raise RedisUnreachable or RedisRefused.

    Keys of the same tenant have separate chats because each key belongs to one person or program.
    """

    def __init__(self, redis: Redis, caller: Caller) -> None:
        self._redis = redis
        self._owner = caller.key_id or caller.tenant or ""

    async def list(self) -> list[ChatEntry]:
        """Return the caller's chats, latest first."""
        with reaching_redis():
            found: Any = await self._redis.zrange(self._index, 0, MAX_CHATS - 1, desc=True, withscores=True)
            async with self._redis.pipeline(transaction=False) as pipe:
                for chat_id, _ in found:
                    pipe.hget(self._key(chat_id.decode()), _TITLE)
                titles: Any = await pipe.execute()
        return [
            ChatEntry(id=chat_id.decode(), title=title.decode(), changed_at=changed_at)
            for (chat_id, changed_at), title in zip(found, titles, strict=True)
            if title is not None
        ]

    async def read(self, chat_id: str) -> ConsoleChat | None:
        """Return a chat, or None if it does not exist or has expired."""
        with reaching_redis():
            found: Any = await self._redis.hget(self._key(chat_id), _DATA)
        return None if found is None else ConsoleChat.model_validate_json(found)

    async def update(self, chat_id: str, change: Callable[[ConsoleChat], ConsoleChat]) -> ConsoleChat:
        """Replace a chat with the result of `change`, which receives an empty chat if the chat does not exist.

        `change` is called again if another process writes the chat at the same time, and may raise an error.
        """
        key = self._key(chat_id)
        with reaching_redis():
            async with self._redis.pipeline(transaction=True) as pipe:
                while True:
                    await pipe.watch(key)
                    found: Any = await pipe.hget(key, _DATA)
                    before = ConsoleChat(id=chat_id) if found is None else ConsoleChat.model_validate_json(found)
                    chat = change(before)
                    if chat == before:
                        return chat
                    pipe.multi()  # type: ignore[no-untyped-call]
                    self._add_write(pipe, chat)
                    try:
                        await pipe.execute()
                    except WatchError:
                        continue
                    break
        if found is None:
            await self._delete_surplus()
        return chat

    def _add_write(self, pipe: Any, chat: ConsoleChat) -> None:
        key = self._key(chat.id)
        if not chat.turns:
            pipe.delete(key)
            pipe.zrem(self._index, chat.id)
            return
        pipe.hset(key, mapping={_TITLE: chat.title, _DATA: chat.model_dump_json()})
        pipe.expire(key, CHAT_TTL_S)
        pipe.zadd(self._index, {chat.id: time.time()})
        pipe.expire(self._index, CHAT_TTL_S)

    async def delete(self, chat_id: str) -> None:
        """Delete a chat. If an answer is in progress, its job is not cancelled."""
        with reaching_redis():
            async with self._redis.pipeline(transaction=True) as pipe:
                self._add_write(pipe, ConsoleChat(id=chat_id))
                await pipe.execute()

    async def _delete_surplus(self) -> None:
        with reaching_redis():
            surplus: Any = await self._redis.zrange(self._index, 0, -MAX_CHATS - 1)
        for chat_id in surplus:
            await self.delete(chat_id.decode())

    @property
    def _index(self) -> str:
        return console_chats_key(self._owner)

    def _key(self, chat_id: str) -> str:
        return console_chat_key(self._owner, chat_id)
