"""The message of a job, as Celery's consumer holds it while the job runs."""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime
from typing import Any

from celery.platforms import signals
from celery.utils.time import maybe_make_aware
from celery.worker import state as worker_state
from celery.worker.request import Request
from kombu.asynchronous import get_event_loop
from redis.exceptions import RedisError

from cellama.tasks.contract.events import done
from cellama.tasks.state.history import read_past
from cellama.tasks.state.ledger import Ledger

from .pool import Interruption, JobControl

log = logging.getLogger(__name__)


class JobRequest(Request):  # type: ignore[misc]
    """Settles its message (ack or reject) once.

    Celery checks and sets `acknowledged` in two steps, which is safe with one thread. Here a job may end in its
    own thread while the main thread revokes it; the second ack would raise in Celery's event loop and end the worker.

    The message of a superseded attempt is not its own any more, because another worker or none holds it now.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._settle_lock = threading.Lock()
        self._settled = False
        super().__init__(*args, **kwargs)

    def maybe_expire(self) -> bool | None:
        """Return whether the job has expired. A job that has started before does not, because it is continued."""
        expires: datetime | None = self.expires  # type: ignore[has-type]
        if expires and maybe_make_aware(expires) < datetime.now(UTC) and self._has_begun():
            self.expires = None
        result: bool | None = super().maybe_expire()
        return result

    def _has_begun(self) -> bool:
        try:
            return Ledger(self.app.backend.client).state(self.id) not in (None, "queued")
        except RedisError:
            return True  # as far as it can be known

    def _claim_settlement(self) -> bool:
        with self._settle_lock:
            first, self._settled = not self._settled, True
        return first

    @property
    def _control(self) -> JobControl | None:
        return self._apply_result() if self._apply_result is not None else None  # a weak reference

    @property
    def _is_superseded(self) -> bool:
        control = self._control
        return control is not None and control.interruption is Interruption.SUPERSEDED

    @property
    def holds_message(self) -> bool:
        """Whether the message is this worker's, as far as it knows. Any thread."""
        return not self.acknowledged and not self._is_superseded

    def supersede(self) -> None:
        """End the attempt without an event, because another worker has the job by now. Any thread."""
        if (control := self._control) is not None:
            control.interrupt(Interruption.SUPERSEDED)

    def _forget_message(self) -> None:
        """Free the place that the message takes in this worker, and nothing else."""
        self._message.channel.qos.forget(self._message)
        self.acknowledged = True
        if (hub := get_event_loop()) is not None:
            hub.call_soon(lambda: None)  # the loop reads the queues in each turn, and this makes it turn

    def acknowledge(self) -> None:
        if self._claim_settlement():
            control = self._control
            if self._is_superseded or (control is not None and control.is_settled):
                self._forget_message()
            else:
                super().acknowledge()

    def reject(self, requeue: bool = False) -> None:
        if self._claim_settlement():
            if self._is_superseded:
                self._forget_message()
            else:
                super().reject(requeue)

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """Terminate as Celery does, but send Celery's events of the end before the job ends, not after it."""
        if not self.time_start:
            super().terminate(pool, signal)  # which comes back here when it has begun
            return
        signum = signals.signum(signal or "TERM")
        try:
            self._announce_revoked("terminated", True, signum, False)
        finally:
            pool.terminate_job(self.worker_pid, signum)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """Do what Celery does. A job whose hard limit passes before it starts ends here, because no attempt ends it."""
        super().on_timeout(soft, timeout)
        if soft or worker_state.should_terminate:
            return
        redis = self.app.backend.client
        ledger = Ledger(redis)
        try:
            if ledger.state(self.id) in ("queued", "handed_back"):
                ledger.end_waiting(self.id, done("timeout", read_past(redis, self.id).usage))
        except RedisError as error:
            log.warning("can't end job %s, whose time limit has passed, in Redis: %s", self.id, error)

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
        """Return the job to its queue, because Celery exits at once."""
        control = self._control
        if control is not None:
            control.interrupt(Interruption.HANDED_BACK)
