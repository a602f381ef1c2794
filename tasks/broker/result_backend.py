"""Celery's result backend on Redis, with one round trip per state instead of two, and none for the ledger.

Keys, values and channels are Celery's own, so every Celery reads the results.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from celery import states
from celery.backends.redis import RedisBackend
from celery.exceptions import BackendStoreError
from redis import Redis
from redis.exceptions import RedisError

from cellama.config import get_settings, mask_url
from cellama.tasks.connection.connections import SOCKET_OPTIONS, connect
from cellama.tasks.contract.keys import job_key
from cellama.tasks.state.encoding import encode
from cellama.tasks.state.records import CeleryState
from cellama.tasks.state.scripts import run_script

from .celery_ends import is_stored_already

ID_MARK = "cellama-task-id"
CHORD_CLAIM_S = 30  # in which only the worker that counted the last part of a chord may send its body


class ResultBackend(RedisBackend):  # type: ignore[misc]
    """Stores a state with one script. Safe from any thread."""

    def __init__(self, *args: Any, app: Any, url: str | None = None, **options: Any) -> None:
        """Connect to `url`, or else to the app's Redis: Celery would show some passwords of a URL in `inspect conf`."""
        super().__init__(*args, app=app, url=url or app.redis_url or get_settings().redis_url, **options)

    def _params_from_url(self, url: str, defaults: dict[str, Any]) -> dict[str, Any]:
        """Return nothing, because `connect` alone parses URLs."""
        return {}

    def _create_client(self, **_: Any) -> Redis:
        return connect(self.url, **SOCKET_OPTIONS)

    def as_uri(self, include_password: bool = False) -> str:
        url: str = self.url
        return url if include_password else mask_url(url)

    def _store_result(
        self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None, **_: Any
    ) -> Any:
        """What Celery does here (KeyValueStoreBackend), retried as it does. Raises BackendStoreError.

        A result that was stored with the last event of its job is there already (celery_ends.py).
        """
        if is_stored_already(request, state):
            return result
        value = self._value(task_id, result, state, traceback, request)
        if len(value) > self._MAX_STR_VALUE_SIZE:
            raise BackendStoreError("value too large for Redis backend", state=state, task_id=task_id)
        expires = self.failure_expires if state == states.FAILURE else self.expires
        keys = [self.get_key_for_task(task_id), job_key(task_id)]
        args = [value, expires or "", state if state in states.READY_STATES else ""]
        self.ensure(self._run, (keys, args))
        return result

    def on_chord_part_return(self, request: Any, state: str, result: Any, *args: Any, **options: Any) -> Any:
        """Count a part of a chord as Celery does, and retry while Redis is away, which Celery doesn't. No part counts
        twice."""
        return self._ensure_retryable(super().on_chord_part_return, request, state, result, *args, **options)

    def stored(self, task_id: str, result: Any, state: str, request: Any) -> CeleryState:
        """Return what Celery stores in this state of a task, to be stored by a script. Raises what `encode` raises."""
        value = self._value(task_id, result, state, None, request)
        return CeleryState(value if isinstance(value, bytes) else value.encode(), self.expires)

    def value_around_id(self, error: Exception, state: str) -> tuple[bytes, bytes]:
        """Return what is stored for a task that ended with this error, as the parts before and behind its id."""
        stored = self.stored(ID_MARK, self.encode_result(error, state), state, None)
        before, _, behind = stored.value.partition(ID_MARK.encode())
        return before, behind

    def _value(self, task_id: str, result: Any, state: str, traceback: Any, request: Any) -> bytes | str:
        meta = self._get_result_meta(result=result, state=state, traceback=traceback, request=request)
        return self._encoded({**meta, "task_id": task_id})

    def _encoded(self, meta: dict[str, Any]) -> bytes | str:
        """Encode as Celery does, but fast: vectors are JSON already."""
        try:
            return encode(meta)
        except TypeError:  # what a user's own task gives: dates, decimals
            return self.encode(meta)  # type: ignore[no-any-return]

    def _chord_publish_claim_expires(self, initial_expires: int, callback: Any) -> int:
        """Return the seconds of a claim. Celery's estimate includes all retries, which are thousands here."""
        return max(initial_expires, CHORD_CLAIM_S)

    def is_chord_claimed(self, request: Any) -> bool:
        """Return whether a worker has claimed the body of the chord that this job belongs to, and has not sent it yet.

        Celery deletes the size of a chord once its body has been sent, or the chord has failed.
        """
        claim, size = self.client.mget(
            self.get_key_for_group(request.group, ".c"), self.get_key_for_group(request.group, ".s")
        )
        return claim not in (None, b"done") and size is not None

    def has_body_run(self, request: Any) -> bool:
        """Return whether the body of this job's chord has a final state."""
        body_id = request.chord["options"].get("task_id")
        return body_id is not None and self.get_state(body_id) in states.READY_STATES

    def remove_pending_result(self, result: Any) -> Any:
        """Unsubscribe from a result that nobody waits for any more, as Celery does when it is garbage collected.

        While Redis is away, or the interpreter exits, there is no subscription to end.
        """
        if not sys.is_finalizing():
            with contextlib.suppress(RedisError, RuntimeError):  # Celery raises RuntimeError after its last retry
                super().remove_pending_result(result)
        return result

    def _run(self, keys: list[Any], args: list[Any]) -> Any:
        return run_script(self.client, "store_result", keys, args)
