"""Run a work file's lines by sending them to workers in chunks, and write their results as they arrive."""

from __future__ import annotations

import contextlib
import difflib
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from cellama.config import get_settings
from cellama.config.logging import event_logger
from cellama.tasks.app import CellamaApp
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.errors import JobError, RedisRefused, RedisUnreachable, UnknownJob, UnknownModel
from cellama.tasks.contract.events import TerminalEvent, is_terminal
from cellama.tasks.contract.journal import events_in
from cellama.tasks.contract.keys import job_key, journal_key
from cellama.tasks.contract.kinds.chunk import MAX_CHUNK_LINES, TASK_CHUNK, line_bytes, max_lines_bytes
from cellama.tasks.contract.names import DEFAULT_MODEL, PRIORITY_BULK, WEIGHT_HEADER, model_named
from cellama.tasks.estimates.position import position_of
from cellama.tasks.state.bulk_runs import Batches
from cellama.tasks.state.registry import live_workers

from .lines import StoredLine
from .options import TOKENS, Progress
from .output import LINES_PER_WRITE, LineFile, OutcomeList, Outcomes
from .work import FAILED, FINISHED, WorkFile

log = event_logger(__name__)

BLOCK_MS = 200  # a read of events blocks for this time, which is also the maximum delay until free slots get a chunk
MAX_EVENTS_PER_READ = 2000  # a few MB of results in memory
RETRY_S = 1.0  # pause after an error of Redis, so that an outage costs one call per second
REFRESH_S = 1.0  # between two reads of the registry and of cancel requests: the delay of a cancellation
LOST_S = 15.0  # without an event of a chunk, before the run checks whether Redis still has the chunk
MAX_TRIES = 3  # attempts at a line with a retryable error or a crashed worker, the same as for other jobs
SLOTS_PER_CHUNK = 2  # a chunk has twice as many lines as a worker has slots, and a worker gets …
CHUNKS_PER_WORKER = 2  # … two chunks, so that a line is always waiting when a slot becomes free
MAX_CHUNK_BYTES = 2 << 20  # maximum size of a message: Redis and workers handle 2 MiB without pauses
TEXTS_PER_WORKER = 256  # lines at the same time for a worker without slots, which embeds texts in batches
MODEL_TIMEOUT_S = 30.0  # for a model that no worker serves, because a worker may just be about to load it


def check_model(redis: Redis, model: str | None) -> None:
    """Raise UnknownModel if workers are running but none of them has the model.

    This check finds typos before the input is read.
    """
    with reaching_redis():
        workers = live_workers(redis)
    model = model and model_named(model)
    known = sorted({entry["id"] for worker in workers for entry in worker.models})
    if not known or model in (None, DEFAULT_MODEL, *known):
        return
    close = difflib.get_close_matches(str(model), known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"models: {', '.join(known)}."
    raise UnknownModel(f"no running worker serves the model {model!r}; {hint} To load it, use `cellama models load`")


class Serving:
    """The models that workers serve, as of the last refresh."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._models: dict[str, tuple[int, int]] = {}  # model → number of workers, slots per worker
        self._seen: set[str] = set()  # models that a worker has served or loaded
        self._missing_since: dict[str, float] = {}

    def refresh(self, models: Iterable[str]) -> None:
        """Read the registry. `models` contains the models that pending lines use."""
        workers = live_workers(self._redis)
        self._models = {}
        for worker in workers:
            for model in worker.models:
                if model["status"] == "loading":
                    self._seen.add(model["id"])
                if model["status"] == "ready":
                    slots = model["engine"]["slots_total"] if model["engine"] else TEXTS_PER_WORKER
                    for name in {model["id"], DEFAULT_MODEL if model["default"] else model["id"]}:
                        count, max_slots = self._models.get(name, (0, 0))
                        self._models[name] = (count + 1, max(max_slots, slots))
        self._seen |= self._models.keys()
        now = time.monotonic()
        missing = [model for model in models if model not in self._seen] if workers else []
        self._missing_since = {model: self._missing_since.get(model, now) for model in missing}

    @property
    def num_workers(self) -> int:
        """Return the largest number of workers that serve the same model."""
        return max((count for count, _ in self._models.values()), default=0)

    def of(self, model: str) -> tuple[int, int]:
        """Return the number of workers that serve a model, and the number of lines that each runs concurrently."""
        return self._models.get(model, (0, 0))

    def unknown(self) -> dict[str, UnknownModel]:
        """Return the models that no worker has served for MODEL_TIMEOUT_S, mapped to the errors for their lines."""
        until = time.monotonic() - MODEL_TIMEOUT_S
        served = ", ".join(sorted(name for name in self._models if name != DEFAULT_MODEL)) or "none"
        return {
            model: UnknownModel(
                f"no worker serves the model {model!r}; models: {served}. Load it with `cellama models load`, or "
                "correct the line, and then run `cellama batch resume OUTPUT --retry-failed`"
            )
            for model, since in self._missing_since.items()
            if since <= until
        }


@dataclass(slots=True)
class _Chunk:
    last_id: str = "0-0"
    last_event_at: float = field(default_factory=time.monotonic)


class BatchRun:
    """Executes one run in one thread. All state that must survive a crash is in the work file."""

    def __init__(
        self,
        redis: Redis,
        app: CellamaApp,
        *,
        work: WorkFile,
        output: LineFile | None,
        output_path: Path,
        errors: LineFile,
        fairness_key: str | None = None,
        deadline_s: float | None = None,
        ordered: bool = False,
        drops_columns: bool = False,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """Prepare a run.

        `deadline_s` is relative to the current time. With `ordered`, results are written in input order. Without
        `output`, results stay in the work file, and the caller writes them to `output_path` afterwards.
        """
        self._redis = redis
        self._app = app
        self._batches = Batches(redis)
        self._work = work
        self._output_path = output_path
        self._fairness_key = fairness_key
        self._deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self._on_progress = on_progress
        self.id = work.get("run_id")
        self.progress = progress_of(work)
        self._outcomes = Outcomes(work, output, errors, self.progress, ordered=ordered, drops_columns=drops_columns)
        self._chunks: dict[str, _Chunk] = {}
        self._serving = Serving(redis)
        self._next_refresh = 0.0

    def run(self) -> str:
        """Run all pending lines.

        Return the final state (completed, cancelled or expired), which the caller must report. Raises OSError if a disk
        is full. If this call raises or is interrupted, workers finish the lines in flight, and the next command reads
        their results unless the run is abandoned.
        """
        self._chunks = {chunk: _Chunk() for chunk in self._work.chunks()}
        self.progress.in_flight = self._work.in_flight()
        self._report("in_progress")
        self._outcomes.write_held()
        final_state = None
        while final_state is None and (self._chunks or self._work.pending):
            try:
                with reaching_redis(self._app.redis_url):
                    final_state = self._step()
                self.progress.notice = self._wait_reason()
            except (RedisError, RedisUnreachable, RedisRefused) as error:
                problem = str(error) if isinstance(error, RedisRefused) else "Redis does not answer"
                self.progress.notice = f"{problem} ({type(error).__name__}); retrying"
                time.sleep(RETRY_S)
            self._on_progress(self.progress)
        return final_state or "completed"

    def end(self, state: str, **facts: str) -> None:
        """Write the run's final state, and other facts about the run, to Redis."""
        self._report(state, **facts)

    def _step(self) -> str | None:
        """Send chunks and read events once.

        Return the final state if the run is cancelled or expires, otherwise None.
        """
        if time.monotonic() >= self._next_refresh:
            self._next_refresh = time.monotonic() + REFRESH_S
            self._serving.refresh(self._work.pending)
            self.progress.workers = self._serving.num_workers
            self.progress.ahead = self._jobs_ahead()
            self._report("in_progress")
            if self._batches.take_cancel(self.id):
                return self._stop("cancelled")
            self._find_lost()
            for model, error in self._serving.unknown().items():
                self._fail_all(model, error)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return self._stop("expired")
        self._send_chunks()
        self._read_events()
        return None

    # Sending chunks

    def _send_chunks(self) -> None:
        for model in self._work.pending:
            workers, slots = self._serving.of(model)
            room = CHUNKS_PER_WORKER * SLOTS_PER_CHUNK * slots * workers - self._work.in_flight(model)
            while room > 0 and (sent := self._send_chunk(model, workers, slots)):
                room -= sent

    def _send_chunk(self, model: str, workers: int, slots: int) -> int:
        """Send a model's next lines as one chunk, and return the number of lines in the chunk.

        The last chunks are smaller so that all workers finish at about the same time.
        """
        count = SLOTS_PER_CHUNK * slots
        if workers > 1:
            count = min(count, -(-self._work.pending.get(model, 0) // (CHUNKS_PER_WORKER * workers)))
        room = min(MAX_CHUNK_BYTES, max_lines_bytes(model, get_settings().max_payload_bytes))
        lines = _fitting_lines(self._work.next_lines(model, max(1, min(count, MAX_CHUNK_LINES))), room)
        if not lines:
            return 0
        name = str(uuid.uuid4())
        with self._work.transaction():
            self._work.take(name, lines)
        params = [{"kind": line.kind, "params": line.params} for line in lines]
        try:
            self._app.tasks[TASK_CHUNK].apply_async(
                (model, params),
                {"priority": PRIORITY_BULK},
                task_id=name,
                headers={WEIGHT_HEADER: len(lines)},
                fairness_key=self._fairness_key,
            )
        except BaseException:
            self._work.give_back(name, tried=False)
            raise
        self._chunks[name] = _Chunk()
        self.progress.in_flight += len(lines)
        return len(lines)

    def _find_lost(self) -> None:
        """Make a chunk's lines pending again if Redis has lost the chunk or the chunk has expired."""
        for name, chunk in list(self._chunks.items()):
            if time.monotonic() - chunk.last_event_at > LOST_S:
                chunk.last_event_at = time.monotonic()
                if not self._redis.exists(job_key(name), journal_key(name)):
                    log.warning(
                        "chunk of bulk run lost",
                        chunk=name,
                        detail="the chunk is missing from Redis; its lines will be sent again",
                    )
                    self._end_chunk(name, tried=False)

    def _wait_reason(self) -> str:
        missing = [model for model in self._work.pending if not self._serving.of(model)[0]]
        if missing:
            return f"no live worker serves {', '.join(missing)}; start one with `cellama worker`"
        return f"waiting in the queue, {self.progress.ahead} jobs ahead" if self.progress.ahead else ""

    def _jobs_ahead(self) -> int:
        """Return the number of jobs ahead of the first chunk in the queue.

        Return 0 once the first line has finished.
        """
        if self.progress.ended:
            return 0
        try:
            return min((position_of(self._redis, name).ahead for name in self._chunks), default=0)
        except UnknownJob:
            return 0

    def _fail_all(self, model: str, error: JobError) -> None:
        """Mark all pending lines of a model as failed."""
        while lines := self._work.next_lines(model, LINES_PER_WRITE):
            self._outcomes.save([], [(line, {"code": error.code, "message": str(error)}) for line in lines])

    # Reading events

    def _read_events(self) -> None:
        if not self._chunks:
            time.sleep(BLOCK_MS / 1000)
            return
        streams: Any = {journal_key(name): chunk.last_id for name, chunk in self._chunks.items()}
        reply: Any = self._redis.xread(streams, count=MAX_EVENTS_PER_READ, block=BLOCK_MS)
        results: OutcomeList = []
        failures: OutcomeList = []
        finished: list[tuple[str, TerminalEvent]] = []
        for key, entries in reply or []:
            name = key.decode().removeprefix(journal_key(""))
            chunk = self._chunks[name]
            chunk.last_event_at, chunk.last_id = time.monotonic(), entries[-1][0].decode()
            event: Any
            for event in events_in(entries):
                if event["type"] == "line":
                    self._sort_line(name, event, results, failures)
                elif is_terminal(event):
                    finished.append((name, event))
        self._outcomes.save(results, failures)
        for name, event in finished:
            self._end_chunk(name, tried=event["type"] == "error")

    def _sort_line(self, chunk: str, event: dict[str, Any], results: OutcomeList, failures: OutcomeList) -> None:
        line = self._work.line(chunk, event["line"])
        if line is None:
            return  # an earlier command has read it
        error = event.get("error")
        if error is None:
            results.append((line, event["result"]))
        elif error["retryable"] and line.tries + 1 < MAX_TRIES:
            self._work.retry(line)
        else:
            failures.append((line, error))

    def _end_chunk(self, name: str, *, tried: bool) -> None:
        """Forget a chunk. The chunk's unfinished lines become pending again, or fail after MAX_TRIES attempts."""
        with self._work.transaction():
            self._work.give_back(name, tried=tried)
        for line in self._work.tried_out(MAX_TRIES) if tried else ():
            message = f"its workers crashed {MAX_TRIES} times in a row"
            self._outcomes.save([], [(line, {"code": "dead", "message": message, "retryable": False})])
        del self._chunks[name]
        self._redis.delete(journal_key(name))
        self.progress.in_flight = self._work.in_flight()

    # Stopping

    def abandon(self) -> None:
        """Cancel the in-flight lines of a run that can't be resumed."""
        with contextlib.suppress(RedisUnreachable, RedisRefused), reaching_redis(self._app.redis_url):
            self._revoke_chunks()
        self._report("cancelled")

    def _revoke_chunks(self) -> None:
        for name in self._chunks:
            self._app.AsyncResult(name).revoke(terminate=True)

    def _stop(self, state: str) -> str:
        """Cancel the in-flight lines, and read the results of lines that have finished. Return `state`."""
        self._report("cancelling" if state == "cancelled" else "finalizing")
        self._revoke_chunks()
        until = time.monotonic() + 10
        while self._chunks and time.monotonic() < until:
            self._read_events()
        for name in list(self._chunks):
            self._end_chunk(name, tried=False)
        return state

    def _report(self, state: str, **facts: str) -> None:
        """Update the run in Redis.

        If Redis does not answer, the run continues, and `status` shows an outdated state.
        """
        progress: Mapping[str, Any] = {
            name: getattr(self.progress, name) for name in ("total", "finished", "failed", *TOKENS)
        }
        try:
            self._batches.write(self.id, state=state, output=str(self._output_path.absolute()), **progress, **facts)
        except RedisError as error:
            log.warning("run state not updated", run=self.id, detail=f"{error}; retrying in {REFRESH_S:g} s")


def progress_of(work: WorkFile) -> Progress:
    """Read a run's progress from its work file at the start of a command."""
    unreadable = int(work.get("unreadable", "0"))
    progress = Progress(
        total=sum(work.count(state) for state in range(5)) + unreadable,
        finished=work.count(FINISHED),
        failed=work.count(FAILED) + unreadable,
    )
    for name in TOKENS:
        setattr(progress, name, int(work.get(name, "0")))
    progress.already = progress.finished + progress.failed
    progress.finished_before = progress.finished
    progress.tokens_before = progress.completion_tokens
    return progress


def _fitting_lines(lines: list[StoredLine], room: int) -> list[StoredLine]:
    """Return as many lines as fit in a message of `room` bytes.

    At least one line fits because the size of each line was checked earlier.
    """
    size = 0
    fitting: list[StoredLine] = []
    for line in lines:
        size += line_bytes(line.kind, line.params)
        if fitting and size > room:
            break
        fitting.append(line)
    return fitting
