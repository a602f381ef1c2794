"""Run scripts of many threads in few round trips: during one round trip the next calls gather, and are sent together.

Each script is a step of its own, as if it had been sent alone: what fails for one fails for no other. A call that
comes alone is sent at once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import Redis
from redis.exceptions import NoScriptError

from .scripts import run_script, sha


@dataclass(eq=False, slots=True)
class ScriptCall:
    """A script that a thread waits for, and its reply or error."""

    name: str
    keys: Sequence[str]
    args: Sequence[Any]
    answered: threading.Event = field(default_factory=threading.Event)  # or it is this thread that sends the next page
    reply: Any = None
    error: BaseException | None = None
    is_done: bool = False

    def end(self, reply: Any) -> None:
        self.reply, self.error = (None, reply) if isinstance(reply, BaseException) else (reply, None)
        self.is_done = True
        self.answered.set()


class Gathered:
    """Runs scripts for any thread. A thread that finds no other one sending sends the calls of all that wait."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._lock = threading.Lock()
        self._waiting: list[ScriptCall] = []
        self._is_sending = False

    def run(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run the script of this name, and return its reply. Raises RedisError."""
        call = ScriptCall(name, keys, args)
        with self._lock:
            self._waiting.append(call)
            sends, self._is_sending = not self._is_sending, True
        if not sends:
            call.answered.wait()
        if not call.is_done:
            self._send()
        if call.error is not None:
            raise call.error
        return call.reply

    def _send(self) -> None:
        """Send the calls that wait, including this thread's. The first of the later calls sends those."""
        with self._lock:
            page, self._waiting = self._waiting, []
        try:
            replies = self._replies(page)
        except BaseException as error:  # all of these calls have failed
            replies = [error] * len(page)
        with self._lock:
            next_one = self._waiting[0] if self._waiting else None
            self._is_sending = next_one is not None
        if next_one is not None:
            next_one.answered.set()
        for call, reply in zip(page, replies, strict=True):
            call.end(reply)

    def _replies(self, page: Sequence[ScriptCall]) -> list[Any]:
        if len(page) == 1:
            return [run_script(self._redis, page[0].name, page[0].keys, page[0].args)]
        with self._redis.pipeline(transaction=False) as pipe:
            for call in page:
                pipe.evalsha(sha(call.name), len(call.keys), *call.keys, *call.args)
            replies = pipe.execute(raise_on_error=False)
        return [self._again(call, reply) for call, reply in zip(page, replies, strict=True)]

    def _again(self, call: ScriptCall, reply: Any) -> Any:
        """Return the reply, or run the script again if Redis did not know it."""
        if not isinstance(reply, NoScriptError):
            return reply
        try:
            return run_script(self._redis, call.name, call.keys, call.args)
        except Exception as error:
            return error
