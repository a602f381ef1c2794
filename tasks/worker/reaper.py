"""Renew the leases of a worker's messages, and recover the jobs of workers that do not renew their leases.

Each worker has a reaper thread, and the reapers of several workers may run concurrently. A reaper handles four cases:

1. A lease has expired because its worker has crashed or is frozen. The message returns to its queue.

2. The ETA of a job has passed. The message returns to its queue.

3. A job is due. Its timeout has passed while no worker is running it, or its outcome is incomplete. An outcome is
   incomplete if Celery has not received it, or if the next task of the job's canvas has not been sent. A reaper claims
   a few jobs at a time, so no two reapers handle the same job.

4. A ticket is lost because its worker was killed between two commands. Then a list has fewer tickets than its backlog
   has jobs, and the reaper pushes the tickets that were already missing a period ago. A running job that no worker
   holds for a whole period is lost, and the reaper queues the job again. A lock in Redis assigns this search to one
   reaper per period.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from celery import states
from celery.worker import state as celery_state
from redis import Redis
from redis.exceptions import RedisError

from cellama.config.logging import event_logger
from cellama.tasks.broker.message import JobRequest, forget_lost, taken_of
from cellama.tasks.connection.redis_waits import RedisLoop
from cellama.tasks.contract import events
from cellama.tasks.contract.events import ending_of_late
from cellama.tasks.contract.keys import (
    cancel_key,
    job_key,
    leases_key,
    missing_key,
    queues_key,
    reaper_key,
    running_key,
    waiting_key,
)
from cellama.tasks.contract.names import PRIORITIES, queue_key
from cellama.tasks.state.history import read_past
from cellama.tasks.state.ledger import Ending, Ledger
from cellama.tasks.state.scripts import run_script

log = event_logger(__name__)

PAGE = 1000  # jobs per command, during which Redis serves no other client
DUE_PAGE = 50  # jobs that a reaper claims together; ending each takes a few commands
RUNS_PER_LEASE = 4  # so that a message is recovered within 1.25 times its lease
RENEWALS_PER_LEASE = 3  # so that one failed renewal does not lose the message
LOCK_SHARE = 0.9  # fraction of the period, so that the lock of a duty expires before the next run
MISSING_SHARE = 0.8  # fraction of a lease after which a job that is still missing counts as lost

REFUSED = "Celery refused the job's message before the job started; see the workers' logs"

Store = Callable[[str, Ending], None]  # stores the end of a job for Celery, and sends the next tasks of its canvas


class LeaseKeeper:
    """Renews the leases of a worker's messages, so that Redis does not deliver them to other workers.

    Renewing uses a separate thread and connection, because Celery's event loop stops while a worker drains. The event
    loop also waits for 2, 4, 6 … s before it reconnects and has no channels until then, so the channels are looked up
    each time.
    """

    def __init__(self, ledger: Ledger, consumer: Any, lease_s: float) -> None:
        self._ledger = ledger
        self._consumer = consumer
        self._lease_s = lease_s
        # Failures are retried early, because the reapers return messages as soon as Redis is reachable.
        self._loop = RedisLoop("lease", self.renew, lease_s / RENEWALS_PER_LEASE, retry_s=lease_s / 12)
        self._loop.start()

    def close(self) -> None:
        self._loop.close(self._lease_s)

    def renew(self) -> int:
        """Renew the lease of every message that this worker holds, and return the number of messages.

        If another worker has taken a message in the meantime, because this worker was frozen or disconnected, this
        worker forgets the message.
        """
        try:
            held = {taken_of(message): message for message in self._held()}
        except (AttributeError, RuntimeError) as error:
            log.info(
                "job leases not renewed",
                detail=f"Celery's consumer changed during the renewal ({error!r}); retrying in the next period",
            )
            return 0
        messages = {taken: message for taken, message in held.items() if taken is not None and taken.token}
        for lost in self._ledger.renew(list(messages), self._lease_s):
            log.warning(
                "job lease lost",
                job_id=lost.job_id,
                detail="the lease was not renewed in time; another worker has taken the job",
            )
            forget_lost(messages[lost])
        return len(messages)

    def _held(self) -> Iterator[Any]:
        """Yield the messages of prefetched jobs and of running jobs, even while Celery is disconnected."""
        for request in list(celery_state.requests.values()):
            if isinstance(request, JobRequest) and request.holds_message:
                yield request.message
        for channel in self._consumer.channels:
            yield from channel.qos.messages()


class Reaper:
    """Recovers jobs: once in `run_once`, or periodically on a thread after `start`."""

    def __init__(self, redis: Redis, ledger: Ledger, store: Store, lease_s: float) -> None:
        self._redis = redis
        self._ledger = ledger
        self._store = store
        self._lease_s = lease_s
        self._loop = RedisLoop("reaper", self.run_once, lease_s / RUNS_PER_LEASE)

    def start(self) -> None:
        self._loop.start()

    def close(self) -> None:
        self._loop.close(self._lease_s)

    def run_once(self) -> None:
        """Handle all four cases. Raises RedisError."""
        if num_restored := self._ledger.restore(self._lease_s):
            log.warning(
                "messages requeued",
                num_messages=num_restored,
                detail="the workers that held the messages crashed or are frozen",
            )
        self.settle_due()
        if self._acquire_duty("missing", self._lease_s):
            self.find_missing()

    def _acquire_duty(self, duty: str, period_s: float) -> bool:
        """Return whether this reaper acquired the lock for a duty in this period."""
        return bool(self._redis.set(reaper_key(duty), "1", nx=True, px=max(1, int(period_s * 1e3 * LOCK_SHARE))))

    # Jobs that are due

    def settle_due(self) -> None:
        """End jobs that are cancelled or past their timeout and that no worker is running.

        Report missing outcomes to Celery.
        """
        while claimed := self._ledger.claim_due(DUE_PAGE, self._lease_s):
            for job_id, state in claimed:
                self._settle_or_log(job_id, state)
            if len(claimed) < DUE_PAGE:
                return

    def _settle_or_log(self, job_id: str, state: str) -> None:
        try:
            self._settle(job_id, state)
        except RedisError:
            raise
        except Exception:  # for example because the user's own broker refuses the next task of a canvas
            log.exception("job not settled", job_id=job_id, detail="a reaper will settle the job later")

    def _settle(self, job_id: str, state: str) -> None:
        if state in ("queued", "handed_back"):
            self._end(job_id)
        elif state == "done":
            ending = self._ledger.ending(job_id)
            if ending is not None:
                self._store(job_id, ending)
            self._ledger.settle(job_id)

    def _end(self, job_id: str) -> None:
        past = read_past(self._redis, job_id)
        fields: Any = self._redis.hmget(job_key(job_id), "task", "refused", "stored")
        task, is_refused, stored = fields
        event: events.Event
        result = None
        if stored == states.REVOKED.encode() or self._redis.exists(cancel_key(job_id)):
            event = events.done("cancelled", past.usage)
        elif is_refused:
            event = events.error("refused", REFUSED)
        else:
            event, result = ending_of_late((task or b"").decode(), past.text, past.num_tokens)
        if self._ledger.end_waiting(job_id, event, result):
            self._store(job_id, Ending(event, result))
            self._ledger.settle(job_id)

    # Lost tickets and jobs

    def find_missing(self) -> int:
        """Push lost tickets, and requeue running jobs that were already lost one period ago.

        Return the number of tickets and jobs.
        """
        missing: Any = self._redis.zrange(missing_key(), 0, -1)
        num_found, suspects = 0, {raw.decode() for raw in missing}
        number_of_check = int(self._ledger.now() / max(1.0, self._lease_s))
        for queue in self._busy_queues():
            found: Any = run_script(self._redis, "restore_backlog", [waiting_key(queue)], [number_of_check, PAGE])
            suspects |= {raw.decode() for raw in found}
            for priority in PRIORITIES:
                num_tickets = self._ledger.add_tickets(queue_key(queue, priority), PAGE)
                if num_tickets:
                    log.warning(
                        "queue tickets restored",
                        queue=queue,
                        num_tickets=num_tickets,
                        detail="the tickets were lost, or a limit was raised",
                    )
                num_found += num_tickets
        num_slots = run_script(self._redis, "check_slots", [], [])
        if num_slots:
            log.warning("slots released", num_slots=num_slots, detail="Redis has lost the ledger entries of the jobs")
        suspects |= set(self._running_without_lease())
        lost = [job_id for job_id in suspects if self._requeue_if_lost(job_id)]
        for job_id in lost:
            log.warning("job requeued", job_id=job_id, detail="the job's message was lost")
        return num_found + len(lost)

    def _requeue_if_lost(self, job_id: str) -> bool:
        keys = [job_key(job_id), cancel_key(job_id)]
        return bool(run_script(self._redis, "missing", keys, [job_id, self._lease_s * MISSING_SHARE]))

    def _busy_queues(self) -> list[str]:
        """Return the queues with waiting jobs or messages, and remove all other queues from the set in Redis."""
        names: Any = self._redis.smembers(queues_key())
        queues = [raw.decode() for raw in names]
        keys = {queue: [waiting_key(queue), *(queue_key(queue, p) for p in PRIORITIES)] for queue in queues}
        with self._redis.pipeline(transaction=False) as pipe:
            for each in keys.values():
                pipe.exists(*each)
            are_busy = dict(zip(keys, pipe.execute(), strict=True))
        for queue, is_busy in are_busy.items():
            if not is_busy:
                run_script(self._redis, "forget_queue", keys[queue], [queue])
        return [queue for queue, is_busy in are_busy.items() if is_busy]

    def _running_without_lease(self) -> Iterator[str]:
        running: Any = self._redis.zrange(running_key(), 0, -1)
        for start in range(0, len(running), PAGE):
            yield from self._without_lease(running[start : start + PAGE])

    def _without_lease(self, ids: list[Any]) -> list[str]:
        leases: Any = self._redis.zmscore(leases_key(), ids)
        return [raw.decode() for raw, lease in zip(ids, leases, strict=True) if lease is None]
