"""A bulk run: lines go out in chunks, results come back and are on disk before they count."""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from cellama.config import get_settings
from cellama.tasks.app import CellamaApp
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.errors import JobError, RedisRefused, RedisUnreachable, UnknownJob, UnknownModel
from cellama.tasks.contract.events import EVENT_FIELD, TerminalEvent, is_terminal
from cellama.tasks.contract.keys import job_key, journal_key
from cellama.tasks.contract.kinds.chunk import MAX_CHUNK_LINES, TASK_CHUNK, line_bytes, room_bytes
from cellama.tasks.contract.names import DEFAULT_MODEL, PRIORITY_BULK, WEIGHT_HEADER
from cellama.tasks.estimates.position import position_of
from cellama.tasks.state.bulk_runs import Batches
from cellama.tasks.state.registry import live_workers

from .lines import StoredLine
from .options import TOKENS, Progress
from .output import LINES_PER_WRITE, Ended, LineFile, Outcomes
from .work import FAILED, FINISHED, WorkFile

log = logging.getLogger(__name__)

BLOCK_MS = 200  # wait for events: the longest time until a chunk is sent for slots that are free
EVENTS_PER_LOOK = 2000  # some MB of results in memory at most
RETRY_S = 1.0  # pause after an error of Redis: an outage costs one call per second
LOOK_S = 1.0  # between looks at workers and at the wish to cancel: what a user notices of a cancel
LOST_S = 15.0  # without an event of a chunk, until Redis is asked whether it still has it: one call per chunk
MAX_TRIES = 3  # attempts at a line whose error may pass, or whose workers die: as for other jobs
SLOTS_PER_CHUNK = 2  # a chunk has twice as many lines as a worker has slots, and a worker has …
CHUNKS_PER_WORKER = 2  # … two chunks, so there is always a line for a slot that becomes free
MAX_CHUNK_BYTES = 2 << 20  # of a message: Redis and workers handle messages of 2 MiB without pauses
TEXTS_AT_ONCE = 256  # lines for a worker of a model without slots, which embeds texts in batches of its own
MODEL_PATIENCE_S = 30.0  # for a model that no live worker has served: loading one may have just begun


def check_model(redis: Redis, model: str | None) -> None:
    """Raise UnknownModel for a model that no live worker has, so that a typo is reported before the input is read."""
    with reaching_redis():
        workers = live_workers(redis)
    known = sorted({entry["id"] for worker in workers for entry in worker.models})
    if not known or model in (None, DEFAULT_MODEL, *known):
        return
    close = difflib.get_close_matches(str(model), known, n=1)
    hint = f"did you mean {close[0]!r}" if close else f"they have: {', '.join(known)}"
    raise UnknownModel(f"no live worker has a model {model!r}; {hint}, or load it with `cellama models load`")


class Serving:
    """Which live workers serve which model, as of the last look."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._models: dict[str, tuple[int, int]] = {}  # → live workers, slots of one
        self._seen: set[str] = set()
        self._missed_since: dict[str, float] = {}

    def look(self, wanted: Iterable[str]) -> None:
        """Read the registry. `wanted` are the models that lines wait for."""
        workers = live_workers(self._redis)
        self._models = {}
        for worker in workers:
            for model in worker.models:
                if model["status"] == "loading":
                    self._seen.add(model["id"])
                if model["status"] == "ready":
                    slots = model["engine"]["slots_total"] if model["engine"] else TEXTS_AT_ONCE
                    for name in {model["id"], DEFAULT_MODEL if model["default"] else model["id"]}:
                        count, most = self._models.get(name, (0, 0))
                        self._models[name] = (count + 1, max(most, slots))
        self._seen |= self._models.keys()
        now = time.monotonic()
        missed = [model for model in wanted if model not in self._seen] if workers else []
        self._missed_since = {model: self._missed_since.get(model, now) for model in missed}

    @property
    def num_workers(self) -> int:
        """How many workers serve the model that most workers serve."""
        return max((count for count, _ in self._models.values()), default=0)

    def of(self, model: str) -> tuple[int, int]:
        """Return how many live workers serve a model, and how many lines one of them runs at once."""
        return self._models.get(model, (0, 0))

    def unknown(self) -> dict[str, UnknownModel]:
        """Return the models that no live worker has served for MODEL_PATIENCE_S, with errors for their lines."""
        until = time.monotonic() - MODEL_PATIENCE_S
        there = ", ".join(sorted(name for name in self._models if name != DEFAULT_MODEL)) or "none"
        return {
            model: UnknownModel(
                f"no worker serves model {model!r}; they serve: {there}. Load it (`cellama models load`), or correct "
                "the line; then `cellama batch resume OUT --retry-failed`"
            )
            for model, since in self._missed_since.items()
            if since <= until
        }


@dataclass(slots=True)
class _Chunk:
    last_id: str = "0-0"
    heard_at: float = field(default_factory=time.monotonic)


class BatchRun:
    """Drives one run to its end. One thread; everything that must survive it is in the work file."""

    def __init__(
        self,
        redis: Redis,
        app: CellamaApp,
        *,
        work: WorkFile,
        output: LineFile,
        errors: LineFile,
        deadline_s: float | None = None,
        ordered: bool = False,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """`deadline_s` counts from now. `ordered` writes results in the order of the input."""
        self._redis = redis
        self._app = app
        self._batches = Batches(redis)
        self._work = work
        self._output = output
        self._deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self._on_progress = on_progress
        self.id = work.get("run_id")
        self.progress = progress_of(work)
        self._outcomes = Outcomes(work, output, errors, self.progress, ordered=ordered)
        self._chunks: dict[str, _Chunk] = {}
        self._serving = Serving(redis)
        self._next_look = 0.0

    def run(self) -> str:
        """Return the state in which the run ends: completed, cancelled, expired. Raises OSError if a disk is full.

        Workers finish what is in flight when this raises or is interrupted. The next command takes the results, unless
        the run is abandoned.
        """
        self._chunks = {chunk: _Chunk() for chunk in self._work.chunks()}
        self.progress.in_flight = self._work.in_flight()
        self._report("in_progress")
        self._outcomes.write_held()
        ended = None
        while ended is None and (self._chunks or self._work.pending):
            try:
                with reaching_redis(self._app.redis_url):
                    ended = self._turn()
                self.progress.notice = self._waits_for()
            except (RedisError, RedisUnreachable, RedisRefused) as error:
                what = str(error) if isinstance(error, RedisRefused) else "Redis does not answer"
                self.progress.notice = f"{what} ({type(error).__name__}); trying again"
                time.sleep(RETRY_S)
            self._on_progress(self.progress)
        state = ended or "completed"
        self._report(state)
        return state

    def _turn(self) -> str | None:
        """Send chunks and take events once. Return the state of a run that ends now, or None."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            self._serving.look(self._work.pending)
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
        self._take_events()
        return None

    # Chunks out

    def _send_chunks(self) -> None:
        for model in self._work.pending:
            workers, slots = self._serving.of(model)
            room = CHUNKS_PER_WORKER * SLOTS_PER_CHUNK * slots * workers - self._work.in_flight(model)
            while room > 0 and (sent := self._send_chunk(model, workers, slots)):
                room -= sent

    def _send_chunk(self, model: str, workers: int, slots: int) -> int:
        """The next lines of a model; towards the end fewer, so that several workers end at about the same time.

        Returns how many lines went out.
        """
        count = SLOTS_PER_CHUNK * slots
        if workers > 1:
            count = min(count, -(-self._work.pending.get(model, 0) // (CHUNKS_PER_WORKER * workers)))
        room = min(MAX_CHUNK_BYTES, room_bytes(model, get_settings().max_payload_bytes))
        lines = _that_fit(self._work.next_lines(model, max(1, min(count, MAX_CHUNK_LINES))), room)
        if not lines:
            return 0
        name = str(uuid.uuid4())
        with self._work.transaction():
            self._work.take(name, lines)
        params = [{"kind": line.kind, "params": line.params} for line in lines]
        try:
            headers = {WEIGHT_HEADER: len(lines)}
            task = self._app.tasks[TASK_CHUNK]
            task.apply_async((model, params), {"priority": PRIORITY_BULK}, task_id=name, headers=headers)
        except BaseException:
            self._work.give_back(name, tried=False)
            raise
        self._chunks[name] = _Chunk()
        self.progress.in_flight += len(lines)
        return len(lines)

    def _find_lost(self) -> None:
        """Send the lines of chunks again that Redis has lost, or that have expired there."""
        for name, chunk in list(self._chunks.items()):
            if time.monotonic() - chunk.heard_at > LOST_S:
                chunk.heard_at = time.monotonic()
                if not self._redis.exists(job_key(name), journal_key(name)):
                    log.warning("chunk %s is lost; its lines are sent again", name)
                    self._end_chunk(name, tried=False)

    def _waits_for(self) -> str:
        missing = [model for model in self._work.pending if not self._serving.of(model)[0]]
        if missing:
            return f"no live worker serves {', '.join(missing)}; start one with `cellama worker`"
        return f"waits in the queue, {self.progress.ahead} jobs are before it" if self.progress.ahead else ""

    def _jobs_ahead(self) -> int:
        """Return how many jobs are ahead of the first chunk in the queue, until the first line has come back."""
        if self.progress.ended:
            return 0
        try:
            return min((position_of(self._redis, name).ahead for name in self._chunks), default=0)
        except UnknownJob:
            return 0

    def _fail_all(self, model: str, error: JobError) -> None:
        """Fail all lines that wait for a model."""
        while lines := self._work.next_lines(model, LINES_PER_WRITE):
            self._outcomes.keep([], [(line, {"code": error.code, "message": str(error)}) for line in lines])

    # Events in

    def _take_events(self) -> None:
        if not self._chunks:
            time.sleep(BLOCK_MS / 1000)
            return
        streams: Any = {journal_key(name): chunk.last_id for name, chunk in self._chunks.items()}
        reply: Any = self._redis.xread(streams, count=EVENTS_PER_LOOK, block=BLOCK_MS)
        results: Ended = []
        failures: Ended = []
        ended: list[tuple[str, TerminalEvent]] = []
        for key, entries in reply or []:
            name = key.decode().removeprefix(journal_key(""))
            chunk = self._chunks[name]
            chunk.heard_at, chunk.last_id = time.monotonic(), entries[-1][0].decode()
            for _, fields in entries:
                event = json.loads(fields[EVENT_FIELD.encode()])
                if event["type"] == "line":
                    self._sort_line(name, event, results, failures)
                elif is_terminal(event):
                    ended.append((name, event))
        self._outcomes.keep(results, failures)
        for name, event in ended:
            self._end_chunk(name, tried=event["type"] == "error")

    def _sort_line(self, chunk: str, event: dict[str, Any], results: Ended, failures: Ended) -> None:
        line = self._work.line(chunk, event["line"])
        if line is None:
            return  # it was taken before
        error = event.get("error")
        if error is None:
            results.append((line, event["result"]))
        elif error["retryable"] and line.tries + 1 < MAX_TRIES:
            self._work.try_again(line)
        else:
            failures.append((line, error))

    def _end_chunk(self, name: str, *, tried: bool) -> None:
        """End a chunk: its unfinished lines wait again, or fail after too many attempts."""
        with self._work.transaction():
            self._work.give_back(name, tried=tried)
        for line in self._work.tried_out(MAX_TRIES) if tried else ():
            code = {"code": "dead", "message": f"its workers died, {MAX_TRIES} times in a row", "retryable": False}
            self._outcomes.keep([], [(line, code)])
        del self._chunks[name]
        self._redis.delete(journal_key(name))
        self.progress.in_flight = self._work.in_flight()

    # The end

    def abandon(self) -> None:
        """Cancel what is in flight of a run that can't be resumed."""
        with contextlib.suppress(RedisUnreachable, RedisRefused), reaching_redis(self._app.redis_url):
            self._revoke_chunks()
        self._report("cancelled")

    def _revoke_chunks(self) -> None:
        for name in self._chunks:
            self._app.AsyncResult(name).revoke(terminate=True)

    def _stop(self, state: str) -> str:
        """Cancel what is in flight, and take the results that it had until then."""
        self._report("cancelling" if state == "cancelled" else "finalizing")
        self._revoke_chunks()
        until = time.monotonic() + 10
        while self._chunks and time.monotonic() < until:
            self._take_events()
        for name in list(self._chunks):
            self._end_chunk(name, tried=False)
        return state

    def _report(self, state: str) -> None:
        """Update the run in Redis. If Redis is away, the run continues, and `status` shows an older state."""
        progress: Mapping[str, Any] = {
            name: getattr(self.progress, name) for name in ("total", "finished", "failed", *TOKENS)
        }
        try:
            self._batches.write(self.id, state=state, output=str(self._output.path.absolute()), **progress)
        except RedisError as error:
            log.warning("run %s: can't update its state in Redis: %s; trying again", self.id, error)


def progress_of(work: WorkFile) -> Progress:
    """Return where a run is by its work file, when a command starts."""
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


def _that_fit(lines: list[StoredLine], room: int) -> list[StoredLine]:
    """Return as many lines as fit into one message, but at least one: its size was checked when it was read."""
    size = 0
    fitting: list[StoredLine] = []
    for line in lines:
        size += line_bytes(line.kind, line.params)
        if fitting and size > room:
            break
        fitting.append(line)
    return fitting
