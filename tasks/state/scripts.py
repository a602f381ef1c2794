"""The Lua scripts of the ledger (tasks/state/lua): each is one step that happens whole or not at all."""

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
    DEAD_KEY,
    DELAYED_KEY,
    DUE_KEY,
    LEASES_KEY,
    MISSING_KEY,
    MOST_WEBHOOK_EVENTS,
    PRIORITY_WEIGHT,
    QUEUES_KEY,
    RUNNING_KEY,
    WEBHOOK_EVENTS_KEY,
    cancel_key,
    chord_key,
    context_key,
    heeded_key,
    job_key,
    journal_key,
    result_key,
    waiting_key,
)
from cellama.tasks.contract.names import SUBMITTED_AT_HEADER, WEIGHT_HEADER

log = logging.getLogger(__name__)

CONSTANTS: dict[str, str | float] = {
    "WAITING": waiting_key(""),
    "JOB": job_key(""),
    "CANCEL": cancel_key(""),
    "RESULT": result_key(""),
    "JOURNAL": journal_key(""),
    "CONTEXT": context_key(""),
    "HEEDED": heeded_key(""),
    "ENDS": WEBHOOK_EVENTS_KEY,
    "MOST_ENDS": MOST_WEBHOOK_EVENTS,
    "QUEUES": QUEUES_KEY,
    "RUNNING": RUNNING_KEY,
    "DELAYED": DELAYED_KEY,
    "DUE": DUE_KEY,
    "LEASES": LEASES_KEY,
    "MISSING": MISSING_KEY,
    "DEAD": DEAD_KEY,
    "CHORD": chord_key(""),
    "WEIGHT": PRIORITY_WEIGHT,
    "OURS": SUBMITTED_AT_HEADER,
    "WEIGHS": WEIGHT_HEADER,
}


def run_script(redis: Redis, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
    """What the script of this name returns. Raises RedisError."""
    return _script(name)(keys=keys, args=args, client=redis)


class SentScript:
    """A script on its way: Redis runs it while its caller does something else. Not for several threads at once.

    If something is wrong with the connection it is run once more, so it must be one that does nothing twice.
    """

    def __init__(self, redis: Redis, name: str, keys: Sequence[str], args: Sequence[Any]) -> None:
        """Sends it. What goes wrong is said by `reply`."""
        self._run_again = functools.partial(run_script, redis, name, keys, args)
        self._pool = redis.connection_pool
        self._connection: Any = None
        try:
            self._connection = self._pool.get_connection()
            self._connection.send_command("EVALSHA", sha(name), len(keys), *keys, *args)
        except RedisError:
            self.close()

    def reply(self) -> Any:
        """What the script returns. Raises RedisError."""
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
        """Gives the connection up, if the reply has not been read."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()
            self._pool.release(connection)


def sha(name: str) -> str:
    """The name by which Redis knows a script that it has run."""
    return str(_script(name).sha)


@functools.cache
def _script(name: str) -> Script:
    return Script(None, source(name).encode())  # type: ignore[arg-type]  # each call names its client


def source(name: str) -> str:
    """A script with its constants and what all share."""
    constants = "".join(f"local {constant} = {value!r}\n" for constant, value in CONSTANTS.items())
    return constants + lua_source(__package__, "prelude", name)
