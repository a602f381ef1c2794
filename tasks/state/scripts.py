"""Run the Lua scripts of the ledger (tasks/state/lua). Each is one atomic step."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from redis import Redis
from redis.commands.core import Script
from redis.exceptions import NoScriptError, RedisError, ResponseError

from cellama.tasks.connection.redis_clock import lua_source
from cellama.tasks.connection.refusals import RefusedForNow
from cellama.tasks.contract.keys import (
    MOST_WEBHOOK_EVENTS,
    PRIORITY_WEIGHT,
    cancel_key,
    chord_key,
    context_key,
    dead_key,
    delayed_key,
    due_key,
    heeded_key,
    job_key,
    journal_key,
    leases_key,
    missing_key,
    queues_key,
    result_key,
    running_key,
    waiting_key,
    webhook_events_key,
)
from cellama.tasks.contract.names import SUBMITTED_AT_HEADER, WEIGHT_HEADER, key_prefix

log = logging.getLogger(__name__)


def run_script(redis: Redis, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
    """Run the script of this name, and return its reply. Raises RedisError."""
    return _script(name)(keys=keys, args=args, client=redis)


class SentScript:
    """A script that Redis runs while its caller does something else. It is not safe for several threads.

    If something is wrong with the connection it is run once more, so it must be one that does nothing twice.
    """

    def __init__(self, redis: Redis, name: str, keys: Sequence[str], args: Sequence[Any]) -> None:
        """Send the script. `reply` raises its errors."""
        self._run_again = functools.partial(run_script, redis, name, keys, args)
        self._pool = redis.connection_pool
        self._connection: Any = None
        try:
            self._connection = self._pool.get_connection()
            self._connection.send_command("EVALSHA", sha(name), len(keys), *keys, *args)
        except RedisError:
            self.close()

    def reply(self) -> Any:
        """Return the reply of the script. Raises RedisError."""
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                return connection.read_response()  # which disconnects if that fails for another reason than the script
            except NoScriptError:
                pass
            except (ResponseError, RefusedForNow):
                raise  # the script may have begun, and a second run would not say that it did not end
            except RedisError as error:
                log.info("a script is run once more: %s", error)
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
    """Return the digest by which Redis knows a script that it has run."""
    return str(_script(name).sha)


def _script(name: str) -> Script:
    return _script_with(name, key_prefix())


@functools.cache
def _script_with(name: str, prefix: str) -> Script:
    """`prefix` is only the key of the cache: the source has it in its constants."""
    return Script(None, source(name).encode())  # type: ignore[arg-type]  # each call names its client


def _constants() -> dict[str, str | float]:
    """Return what every script may use by name: prefixes of keys, keys, names of message headers, and limits."""
    return {
        "WAITING": waiting_key(""),
        "JOB": job_key(""),
        "CANCEL": cancel_key(""),
        "RESULT": result_key(""),
        "JOURNAL": journal_key(""),
        "CONTEXT": context_key(""),
        "HEEDED": heeded_key(""),
        "ENDS": webhook_events_key(),
        "MOST_ENDS": MOST_WEBHOOK_EVENTS,
        "QUEUES": queues_key(),
        "RUNNING": running_key(),
        "DELAYED": delayed_key(),
        "DUE": due_key(),
        "LEASES": leases_key(),
        "MISSING": missing_key(),
        "DEAD": dead_key(),
        "CHORD": chord_key(""),
        "WEIGHT": PRIORITY_WEIGHT,
        "OURS": SUBMITTED_AT_HEADER,
        "WEIGHS": WEIGHT_HEADER,
    }


def source(name: str) -> str:
    """Return the source of a script, with constants and shared functions."""
    constants = "".join(f"local {constant} = {value!r}\n" for constant, value in _constants().items())
    return constants + lua_source(__package__, "prelude", name)
