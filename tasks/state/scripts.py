"""Run the Lua scripts of the ledger (tasks/state/lua/ledger.lua). Each script is one atomic step.

A script can run alone (`run_script`), while its caller does something else (`SentScript`), or together with other
threads' scripts in one round trip (`Gathered`).
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import Redis
from redis.commands.core import Script
from redis.exceptions import NoScriptError, RedisError, ResponseError

from cellama.config.logging import event_logger
from cellama.tasks.connection.connections import lua_source
from cellama.tasks.connection.kombu_internals import take_connection
from cellama.tasks.connection.redis_errors import RefusedForNow
from cellama.tasks.contract.journal import EVENTS_FIELD
from cellama.tasks.contract.keys import (
    MAX_ENDED,
    MAX_WEBHOOK_EVENTS,
    PRIORITY_WEIGHT,
    announcement_key,
    backlog_key,
    blocked_key,
    busy_key,
    cancel_key,
    chord_key,
    context_key,
    costs_key,
    dead_key,
    delayed_key,
    due_key,
    ended_key,
    held_prefixes_key,
    idle_key,
    job_key,
    journal_key,
    leases_key,
    limited_key,
    missing_key,
    old_prefix_holders_key,
    prefix_holders_key,
    queues_key,
    result_key,
    running_key,
    served_key,
    shares_key,
    shortages_key,
    slots_key,
    terms_key,
    waiting_key,
    webhook_events_key,
)
from cellama.tasks.contract.names import SUBMITTED_AT_HEADER, WEIGHT_HEADER, key_prefix

log = event_logger(__name__)

CACHE_TTL_S = 20  # after which a worker that no longer reports its prefix cache counts as gone; it reports every 2 s


def run_script(redis: Redis, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
    """Run the script with this name, and return its reply. Raises RedisError."""
    return _script(name)(keys=keys, args=args, client=redis)


class SentScript:
    """A script that Redis runs while the caller does something else. Not thread-safe.

    If the connection fails, the script is run a second time, so the script must be idempotent.
    """

    def __init__(self, redis: Redis, name: str, keys: Sequence[str], args: Sequence[Any]) -> None:
        """Send the script. `reply` raises the script's errors."""
        self._run_again = functools.partial(run_script, redis, name, keys, args)
        self._pool = redis.connection_pool
        self._connection: Any = None
        try:
            self._connection = take_connection(self._pool)
            self._connection.send_command("EVALSHA", sha(name), len(keys), *keys, *args)
        except RedisError:
            self.close()

    def reply(self) -> Any:
        """Return the reply of the script. Raises RedisError."""
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                return connection.read_response()  # it disconnects unless the script itself has failed
            except NoScriptError:
                pass
            except (ResponseError, RefusedForNow):
                raise  # the script may have been interrupted, and a second run would hide this
            except RedisError as error:
                log.info("reply from Redis script lost", detail=f"{error}; the script will be run again")
            finally:
                self._pool.release(connection)
        return self._run_again()

    def close(self) -> None:
        """Drop the connection if the reply has not been read."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()
            self._pool.release(connection)


def sha(name: str) -> str:
    """Return the digest by which Redis identifies a script that it has already run."""
    return str(_script(name).sha)


def _script(name: str) -> Script:
    return _script_with(name, key_prefix())


@functools.cache
def _script_with(name: str, prefix: str) -> Script:
    """Return the script, cached by `prefix`, which is a part of the constants in the script's source."""
    return Script(None, source(name).encode())  # type: ignore[arg-type]  # each call passes its client


def _constants() -> dict[str, str | float]:
    """Return the constants for all scripts: prefixes of keys, keys, names of message headers, and limits."""
    return {
        "WAITING": waiting_key(""),
        "BACKLOG": backlog_key(""),
        "SHARES": shares_key(""),
        "IDLE": idle_key(""),
        "COSTS": costs_key(""),
        "TERMS": terms_key(),
        "SLOTS": slots_key(""),
        "BLOCKED": blocked_key(""),
        "LIMITED": limited_key(),
        "CACHE_TTL_S": CACHE_TTL_S,
        "HELD": held_prefixes_key(""),
        "BUSY": busy_key(""),
        "HOLDERS": prefix_holders_key(),
        "OLD_HOLDERS": old_prefix_holders_key(),
        "CONTEXT": context_key(""),
        "JOB": job_key(""),
        "CANCEL": cancel_key(""),
        "RESULT": result_key(""),
        "JOURNAL": journal_key(""),
        "EVENTS_FIELD": EVENTS_FIELD,
        "HEEDED": announcement_key(""),
        "ENDS": webhook_events_key(),
        "MAX_ENDS": MAX_WEBHOOK_EVENTS,
        "QUEUES": queues_key(),
        "RUNNING": running_key(),
        "DELAYED": delayed_key(),
        "DUE": due_key(),
        "LEASES": leases_key(),
        "MISSING": missing_key(),
        "SHORTAGES": shortages_key(),
        "SERVED": served_key(),
        "DEAD": dead_key(),
        "ENDED": ended_key(),
        "MAX_ENDED": MAX_ENDED,
        "CHORD": chord_key(""),
        "WEIGHT": PRIORITY_WEIGHT,
        "SUBMITTED_AT_HEADER": SUBMITTED_AT_HEADER,
        "WEIGHT_HEADER": WEIGHT_HEADER,
    }


def source(name: str) -> str:
    """Return the source of a script: the part of ledger.lua after the script's mark, and the functions that it uses.

    Redis runs the definitions again in each call, so unused definitions are omitted, and constants are replaced by
    their values. Otherwise, each function would bind the constants that it uses, which takes longer than creating it.
    """
    shared, scripts = _parts()
    constants = {constant: repr(value) for constant, value in _constants().items()}
    text, functions = scripts[name], []
    for defined, definition in shared:
        literal = re.fullmatch(r"local [A-Z_]+ = ([^\n{}]+?)(?: --[^\n]*)?\n+", definition)
        if literal:
            constants[defined] = literal[1]
        else:
            functions.append((defined, definition))
    for defined, definition in reversed(functions):  # a function uses only earlier ones
        if re.search(rf"\b{defined}\b", text):
            text = definition + text
    return re.sub(rf"\b(?:{'|'.join(constants)})\b", lambda found: constants[found[0]], text)


@functools.cache
def _parts() -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Return the shared definitions in ledger.lua with their names, and the scripts, which follow marks `--@ name`."""
    shared, *rest = re.split(r"^--@ (\w+)\n", lua_source(__package__, "ledger"), flags=re.MULTILINE)
    _, *found = re.split(
        r"^(?=local (?:function )?(\w+))", re.sub(r"^--.*\n", "", shared, flags=re.MULTILINE), flags=re.MULTILINE
    )
    return list(zip(found[::2], found[1::2], strict=True)), dict(zip(rest[::2], rest[1::2], strict=True))


@dataclass(eq=False, slots=True)
class ScriptCall:
    """A script call that a thread is waiting for.

    This object holds the reply or the error once the script has ended.
    """

    name: str
    keys: Sequence[str]
    args: Sequence[Any]
    # Set when the reply is there, or when the waiting thread must send the next page.
    answered: threading.Event = field(default_factory=threading.Event)
    reply: Any = None
    error: BaseException | None = None
    is_done: bool = False

    def end(self, reply: Any) -> None:
        self.reply, self.error = (None, reply) if isinstance(reply, BaseException) else (reply, None)
        self.is_done = True
        self.answered.set()


class Gathered:
    """Runs the scripts of many threads in few round trips. Thread-safe.

    Calls that arrive during a round trip are collected, and then sent together. Each script is a separate step, so an
    error in one script does not affect others. A call is sent immediately if no other thread is sending. Otherwise, the
    thread waits, and the first waiting thread sends the next page for all of them.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._lock = threading.Lock()
        self._waiting: list[ScriptCall] = []
        self._is_sending = False

    def run(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run the script with this name, and return its reply. Raises RedisError."""
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
        """Send the waiting calls, including this thread's call, and let the first later call send the next page."""
        with self._lock:
            page, self._waiting = self._waiting, []
        try:
            replies = self._replies(page)
        except BaseException as error:  # all calls of the page have failed
            replies = [error] * len(page)
        with self._lock:
            next_call = self._waiting[0] if self._waiting else None
            self._is_sending = next_call is not None
        if next_call is not None:
            next_call.answered.set()
        for call, reply in zip(page, replies, strict=True):
            call.end(reply)

    def _replies(self, page: Sequence[ScriptCall]) -> list[Any]:
        if len(page) == 1:
            return [run_script(self._redis, page[0].name, page[0].keys, page[0].args)]
        with self._redis.pipeline(transaction=False) as pipe:
            for call in page:
                pipe.evalsha(sha(call.name), len(call.keys), *call.keys, *call.args)
            replies = pipe.execute(raise_on_error=False)
        return [self._retry_unknown(call, reply) for call, reply in zip(page, replies, strict=True)]

    def _retry_unknown(self, call: ScriptCall, reply: Any) -> Any:
        """Return the reply. If Redis had not cached the script yet, run it again."""
        if not isinstance(reply, NoScriptError):
            return reply
        try:
            return run_script(self._redis, call.name, call.keys, call.args)
        except Exception as error:
            return error
