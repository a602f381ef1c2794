"""Send hostile, almost valid and valid payloads to a real worker, and check that they do not affect other jobs.

The fixed corpus is sent first, then hostile schemas, expressions and grammars, and finally random payloads for every
task. The hostile constraints and the random payloads are drawn from a seed. Half of the payloads, and all payloads that
fail the producer's checks, are sent by a plain Celery application without checks. The other payloads are sent with
`apply_async`. Each payload's job must end within the time limit, and must not affect the jobs of other users. The other
users' jobs are greedy, and their texts are compared with the texts of an undisturbed run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
from celery import Celery
from redis import Redis

from cellama.bench.harness.report import Report
from cellama.bench.harness.service import Service, serving
from cellama.config import get_settings
from cellama.engine.bundled import TINY_PATH
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.events import is_terminal
from cellama.tasks.contract.journal import events_in
from cellama.tasks.contract.keys import journal_key, last_restore_key
from cellama.tasks.contract.names import DEFAULT_MODEL, queue_name
from cellama.tasks.state.registry import live_workers

from .hostile import MODEL, FuzzPayload, corpus, full_contexts
from .hostile_forms import hostile_form

SLOTS = 16
SETTLED_S = 60.0
MOST_MEMORY = 50 * 10**6  # growth in bytes after all jobs have ended
MOST_AT_ONCE = 500 * 10**6  # growth in bytes while payloads run
GIVEN_UP_AFTER = 3  # multiple of the limit, after which the worker is killed so that the rest can continue
POLL_S = 0.01
UNCLEAR = ("internal_error", "engine_stopped", "dead")  # error codes that don't help the sender of the payload
TTLS = {"event_ttl_s": "120", "result_ttl_s": "120", "journal_ttl_s": "300"}  # keys expire during the run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--forms", type=int, default=500, help="number of hostile schemas, expressions and grammars")
    parser.add_argument(
        "--first-form",
        type=int,
        default=0,
        help="index of the first hostile schema, expression or grammar, for example to run a single item",
    )
    parser.add_argument("--payloads", type=int, default=10_000, help="number of random payloads")
    parser.add_argument(
        "--first", type=int, default=0, help="index of the first random payload, for example to run a single payload"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--warm-up",
        type=int,
        default=200,
        help="number of random payloads to send before measuring memory and counting keys",
    )
    parser.add_argument(
        "--corpus", default="", metavar="PART", help="run only corpus entries whose names contain this string"
    )
    parser.add_argument("--in-flight", type=int, default=8, help="number of random payloads to keep in flight")
    parser.add_argument("--in-flight-corpus", type=int, default=1, help="number of corpus entries to keep in flight")
    parser.add_argument("--good", type=int, default=4, help="number of other users' jobs to keep in flight")
    parser.add_argument("--limit", type=float, default=20.0, help="time limit in seconds per payload")


def run(args: argparse.Namespace) -> Report:
    model = {"id": MODEL, "source": str(args.model or TINY_PATH), "n_parallel": SLOTS, "threads": 1}
    model |= {"cache_ram_bytes": 16 << 20}  # filled quickly, so later growth does not come from this cache
    with serving(model, settings=TTLS) as service:
        fuzz = _Fuzz(service, args)
        from .payloads import payload

        numbers = range(args.first, args.first + args.payloads)
        random = (payload(args.seed + 1, number) for number in range(args.warm_up))
        fuzz.run("warm-up", itertools.chain(full_contexts(), random), args.in_flight)
        before = fuzz.level()
        entries = [entry for entry in corpus() if args.corpus in entry.name]
        rows = [fuzz.run("corpus", entries, args.in_flight_corpus)]
        forms = (hostile_form(args.seed, number) for number in range(args.first_form, args.first_form + args.forms))
        rows += [fuzz.run("schemas and grammars", forms, args.in_flight)]
        rows += [fuzz.run("random", (payload(args.seed, number) for number in numbers), args.in_flight)]
        after = fuzz.level(before)
    peak_mb = max(row["peak MB"] for row in rows) - before.rss / 1e6
    ratios = {
        "payloads that were felt by others, late or unclear": float(sum(row["bad"] for row in rows)),
        "good jobs that failed, were late or changed": float(sum(row["good off"] for row in rows)),
        "starts of the worker beyond the first": float(service.num_starts - 1),
        "slots busy afterwards": float(after.slots_busy),
        "keys without an end afterwards": float(len(after.keys - before.keys)),
        "MB more of memory": (after.rss - before.rss) / 1e6,
        "MB more of memory at the worst moment": peak_mb,
    }
    targets = dict.fromkeys(list(ratios)[:-2], "0") | {"MB more of memory": f"<= {MOST_MEMORY // 10**6}"}
    targets |= {"MB more of memory at the worst moment": f"<= {MOST_AT_ONCE // 10**6}"}
    left = [f"left in Redis: {', '.join(sorted(after.keys - before.keys))}"] if after.keys - before.keys else []
    return Report(rows, ratios, targets, [*fuzz.told, *left])


@dataclass(frozen=True)
class _Level:
    """The resource usage of a worker and its Redis, which must return to the initial level when all jobs have ended."""

    slots_busy: int
    rss: int  # resident bytes of the worker
    keys: frozenset[str]  # keys that never expire


def _slots_busy(redis: Redis) -> int:
    """Return the total number of busy slots according to the workers' heartbeats."""
    engines = [model["engine"] for entry in live_workers(redis) for model in entry.models]
    return sum(engine["slots_prefilling"] + engine["slots_decoding"] for engine in engines if engine)


def _lasting_keys(redis: Redis) -> frozenset[str]:
    """Return the keys that have no expiry and would therefore remain in Redis permanently."""
    keys = list(redis.scan_iter(count=1000))
    pipeline = redis.pipeline(transaction=False)
    for key in keys:
        pipeline.ttl(key)
    lasting = {key.decode() for key, ttl in zip(keys, pipeline.execute(), strict=True) if ttl == -1}
    return frozenset(lasting - {last_restore_key()})


@dataclass
class _Job:
    """A job that was sent, and the data for checking the job's outcome."""

    id: str
    sent_at: float
    payload: FuzzPayload | None  # None for a good job
    expected: Any = None
    late: bool = False


@dataclass
class _Tally:
    """The numbers of payloads and jobs in one phase, the longest job duration, and the worker's peak memory."""

    good: int = 0
    good_off: int = 0
    refused: int = 0  # payloads that the producer's checks refused
    unsendable: int = 0
    states: Counter[str] = field(default_factory=Counter)
    bad: set[str] = field(default_factory=set)  # names of payloads
    slowest_s: float = 0.0  # longest time from sending a payload to its end
    peak: int = 0  # maximum resident bytes of the worker


class _Fuzz:
    """A service with two producers, of which only one checks payloads."""

    def __init__(self, service: Service, args: argparse.Namespace) -> None:
        from cellama.tasks import app

        self._service, self._args, self._app = service, args, app
        url = service.redis_server.url
        self._plain = Celery(broker=url, backend=url, set_as_current=False)
        self._process = psutil.Process(service.processes["worker0"].pid)
        self._names = itertools.count()
        self._good = itertools.cycle(_good_calls())
        self._undisturbed: dict[str, Any] = {}
        self._jobs: dict[str, _Job] = {}
        self._tally = _Tally()
        self.told: list[str] = []
        for call in _good_calls():  # alone, as a reference for the same jobs among others
            self._undisturbed[json.dumps(call)] = _text_of(self._send_good(call).get(timeout=SETTLED_S))
        name, arguments, kwargs = next(_good_calls())
        self._plain.send_task(name, arguments, kwargs, queue=queue_name(MODEL)).get(timeout=SETTLED_S)

    def run(self, phase: str, payloads: Iterable[FuzzPayload], at_once: int) -> dict[str, Any]:
        """Send payloads, with at most `at_once` in flight, and count the outcomes of payloads and other users' jobs."""
        self._tally = tally = _Tally()
        started, source, open_ = time.monotonic(), iter(payloads), True
        while open_ or self._jobs:
            hostile = sum(job.payload is not None for job in self._jobs.values())
            while open_ and hostile < at_once and (open_ := (payload := next(source, None)) is not None):
                assert payload is not None
                hostile += self._send(payload)
            for _ in range(self._args.good - (len(self._jobs) - hostile) if open_ or hostile else 0):
                self._add_good()
            self._look()
        ends = ", ".join(f"{count} {state}" for state, count in sorted(tally.states.items()))
        row = {"phase": phase, "payloads": sum(tally.states.values()), "ends": ends, "refused first": tally.refused}
        row |= {"unsendable": tally.unsendable, "bad": len(tally.bad), "good": tally.good, "good off": tally.good_off}
        row |= {"slowest s": round(tally.slowest_s, 2), "peak MB": tally.peak / 1e6}
        return {**row, "seconds": round(time.monotonic() - started, 1)}

    def level(self, before: _Level | None = None) -> _Level:
        """Wait until no job is running and the resource usage is back at `before`, and return the usage.

        After a timeout, return the usage at that time.
        """
        redis, deadline = self._service.redis, time.monotonic() + SETTLED_S
        while True:
            level = _Level(_slots_busy(redis), self._process.memory_info().rss, _lasting_keys(redis))
            quiet = not level.slots_busy
            if before is not None:  # a worker returns memory at one of its next heartbeats
                quiet &= level.keys <= before.keys and level.rss <= before.rss + MOST_MEMORY
            if quiet or time.monotonic() > deadline:
                return level
            time.sleep(POLL_S)

    # Sending

    def _send_good(self, call: tuple[str, list[Any], dict[str, Any]]) -> Any:
        name, args, kwargs = call
        return self._app.tasks[name].apply_async(args, kwargs)

    def _add_good(self) -> None:
        call = next(self._good)
        job_id = self._send_good(call).id
        self._jobs[job_id] = _Job(job_id, time.monotonic(), None, self._undisturbed[json.dumps(call)])

    def _send(self, payload: FuzzPayload) -> bool:
        """Queue a payload for the worker, with or without checks. Return False if JSON can't represent the payload."""
        number = next(self._names)
        job_id = self._send_checked(payload) if number % 2 == 0 else None
        try:
            job_id = job_id or self._send_plain(payload)
        except (ValueError, RecursionError, TypeError) as error:
            self._tally.unsendable += 1
            print(f"{payload.name!r} can't be sent: {type(error).__name__}", file=sys.stderr)
            return False
        self._jobs[job_id] = _Job(job_id, time.monotonic(), payload)
        return True

    def _send_checked(self, payload: FuzzPayload) -> str | None:
        task = self._app.tasks[payload.task]
        try:
            if task.parse(payload.args, payload.kwargs).model not in (MODEL, DEFAULT_MODEL):
                return None  # it would correctly wait for a worker with that model
            return str(task.apply_async(payload.args, payload.kwargs, headers=dict(payload.headers)).id)
        except InvalidJob:
            self._tally.refused += 1
        except Exception as error:  # the benchmark searches for checks that fail instead of refusing
            self._blame(payload, f"the producer raises {type(error).__name__}: {error}")
        return None

    def _send_plain(self, payload: FuzzPayload) -> str:
        options = {"queue": queue_name(MODEL), "headers": dict(payload.headers), "priority": 3}
        return str(self._plain.send_task(payload.task, payload.args, payload.kwargs, **options).id)

    # In

    def _look(self) -> None:
        code = self._service.processes["worker0"].poll()
        if code is not None:
            self._revive(f"its worker exited with code {code}")
        self._tally.peak = max(self._tally.peak, self._resident())
        results = self._results()
        for job_id, meta in results.items():
            self._end(self._jobs.pop(job_id), meta)
        now = time.monotonic()
        for job in list(self._jobs.values()):
            if not job.late and now - job.sent_at > self._args.limit:
                job.late = True
                self._off(job, f"it has not ended after {self._args.limit:g} s")
            if now - job.sent_at > GIVEN_UP_AFTER * self._args.limit:
                self._give_up()
                return
        if not results:
            time.sleep(POLL_S)

    def _resident(self) -> int:
        """Return the worker's resident memory in bytes, or 0 if the worker is not running."""
        try:
            return int(self._process.memory_info().rss)
        except psutil.NoSuchProcess:
            return 0

    def _results(self) -> dict[str, dict[str, Any]]:
        ids = list(self._jobs)
        values: Any = self._service.redis.mget([self._app.backend.get_key_for_task(i) for i in ids]) if ids else []
        metas = {i: json.loads(value) for i, value in zip(ids, values, strict=True) if value}
        return {i: meta for i, meta in metas.items() if meta["status"] in ("SUCCESS", "FAILURE", "REVOKED")}

    def _end(self, job: _Job, meta: dict[str, Any]) -> None:
        status = meta["status"]
        if job.payload is None:
            self._tally.good += 1
            if status != "SUCCESS" or _text_of(meta["result"]) != job.expected:
                self._off(job, f"{status} {str(meta['result'])[:300]}")
            return
        self._tally.states[status] += 1
        self._tally.slowest_s = max(self._tally.slowest_s, time.monotonic() - job.sent_at)
        if status == "FAILURE":
            failure = meta["result"]
            code = failure["exc_message"][0] if failure["exc_type"] == "JobFailed" else failure["exc_type"]
            if failure["exc_type"] != "JobFailed" or code in UNCLEAR:
                self._off(job, f"it fails without a clear error: {code} {str(failure['exc_message'])[:300]}")
        elif status == "REVOKED":
            self._off(job, "it was revoked without a request")
        self._check_stream(job)

    def _check_stream(self, job: _Job) -> None:
        entries: Any = self._service.redis.xrange(journal_key(job.id))
        events = events_in(entries)
        ends = [is_terminal(event) for event in events]
        if ends[-1:] != [True] or sum(ends) != 1:
            self._off(job, f"its stream ends {sum(ends)} times")

    def _off(self, job: _Job, what: str) -> None:
        if job.payload is None:
            self._tally.good_off += 1
            self._say(f"a good job: {what}")
        else:
            self._blame(job.payload, what)

    def _blame(self, payload: FuzzPayload, what: str) -> None:
        self._tally.bad.add(payload.name)
        self._say(f"{payload.name!r} ({payload.task}): {what}")

    def _say(self, what: str) -> None:
        print(what.encode("ascii", "backslashreplace").decode(), file=sys.stderr, flush=True)
        if len(self.told) < 100:
            self.told.append(what.encode("ascii", "backslashreplace").decode())

    def _give_up(self) -> None:
        """Abandon jobs that do not end, and kill their worker so that they do not affect later payloads."""
        for job_id in list(self._jobs):
            self._app.control.revoke(job_id)
        self._jobs.clear()
        self._service.kill("worker0")
        self._revive("it blocked its worker, which was then killed")

    def _revive(self, why: str) -> None:
        for job in self._jobs.values():
            if job.payload is not None:
                self._blame(job.payload, why)
        self._service.start_worker("worker0")
        self._service.wait_ready()
        self._process = psutil.Process(self._service.processes["worker0"].pid)
        for job in self._jobs.values():  # each job restarts once the lease of the dead worker has expired
            job.sent_at = time.monotonic() + get_settings().lease_s


def _good_calls() -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """Yield another user's jobs. The jobs are greedy, so their texts are always the same."""
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    for number in range(6):
        prompt = f"Once upon a time, there were {number} friends of a little fox."
        yield "cellama.generate", [MODEL, prompt], {**greedy, "stream": number % 2 == 0}
    yield "cellama.chat", [MODEL, [{"role": "user", "content": "What is the capital of Norway?"}]], greedy
    yield "cellama.tokenize", [MODEL, "a little fox"], {}


def _text_of(result: dict[str, Any]) -> Any:
    return result.get("text", result.get("tokens"))
