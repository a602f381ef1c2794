"""Run canvases while workers are killed. Each job must end once, each next step must run, and each chord must complete.

Next steps belong to another app, whose worker is not killed. Each next step counts its runs. Celery sends a next step
at least once. If a worker dies after sending the step but before settling the job's message, another worker sends the
step again. Steps that run twice for this reason are counted and reported. A step that never runs is an error. A chord
whose body does not run exactly once is also an error.
"""

from __future__ import annotations

import argparse
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

from celery import Signature, chain, chord, states, uuid

from cellama.bench.harness import fatal_points
from cellama.bench.harness.reference_texts import LOGPROBS, ReferenceText, reference_texts
from cellama.bench.harness.service import Service
from cellama.bench.peers.celery_worker import celery_worker

from .outcomes import (
    broken_promises,
    compare_text,
    ends_row,
    has_final_state,
    is_clean,
    is_whole,
    journal_of,
    metas,
    of_jobs,
    wait_until_quiet,
)
from .scenario import ANIMALS, SOURCE, shown

QUIET_S = 60.0  # seconds without a new end or step, after which the rest is lost; twice the reaper's period for ends
AT_ONCE = 4  # simultaneous canvases that kill a worker; with more, a job could lose three workers and become dead
MOST_ROUNDS = 4  # rounds to kill all workers that should die
KINDS = ("link", "link_error", "chain", "broken chain", "chord", "broken chord")
WRONG_GRAMMAR = "no grammar"  # only the worker detects this, so the job fails there

# Points at which workers die, by kind of canvas, without points after which nothing can follow.
ENDS = (
    ("plain", "ended"),
    ("link", "ended"),
    ("link_error", "ended"),
    ("chain", "ended"),
    ("chord", "ended"),
    ("chain", "sending"),
    ("link", "sent"),
    ("link_error", "stored"),
    ("chord", "claimed"),
    ("chain", "stored"),
    ("link", "acking"),
    ("link_error", "failing"),
    ("chord", "counted"),
    ("chain", "sent"),
    ("link_error", "failed"),
    ("chord", "stored"),
    ("broken chain", "stored"),
    ("chord", "called"),
    ("broken chord", "stored"),
    ("link", "storing"),
    ("link", "stored"),
    ("chord", "acking"),
    ("broken chord", "counted"),
    ("broken chord", "failing"),
    ("broken chain", "ended"),
    ("link_error", "acking"),
    ("chain", "acking"),
    ("chord", "storing"),
)


@dataclass
class Canvas:
    """A canvas and its expected outcome."""

    kind: str
    name: str
    sends: Signature
    jobs: list[str] = field(default_factory=list)  # ids of jobs that return a text
    failing: list[str] = field(default_factory=list)  # ids of jobs that fail
    steps: dict[str, int] = field(default_factory=dict)  # name → how often it must run
    results: list[str] = field(default_factory=list)  # ids of other tasks that must have a final state
    chord_body: str = ""  # id of the chord's body, whose step has the name of the canvas
    num_parts: int = 0
    number: int = 0
    point: str = ""  # where a worker dies

    def marked_id(self) -> str:
        """Return the id of the job or chord body at which a worker dies."""
        if self.point in ("claimed", "called") or (self.kind, self.point) == ("broken chord", "failing"):
            return self.chord_body
        return (self.failing or self.jobs)[0]


class Builder:
    """Builds canvases of any kind. Canvases with the same number have the same prompts."""

    def __init__(self, args: argparse.Namespace, logprobs: int | None = None) -> None:
        self._args = args
        self._logprobs = logprobs
        self._number = 0

    def build(self, number: int, kind: str, point: str, again: int = 0) -> Canvas:
        """Return a canvas whose worker dies at `point`, unless `point` is empty.

        `again` is the number of the repetition, which makes the names of the steps unique.
        """
        self._number = number
        canvas: Canvas = getattr(self, f"_{kind.replace(' ', '_')}")(kind, f"{number} {kind} {point} {again}")
        canvas.number, canvas.point = number, point
        return canvas

    def _job(self, canvas_jobs: list[str], *, model: str = "", **params: Any) -> Signature:
        """Return a job with its own prompt or, if `model` is given, a job that continues the previous job's text."""
        from cellama.tasks import generate

        place = len(canvas_jobs)
        prompt = f"Once upon a time, {place} friends met {self._number} of a little {ANIMALS[place % 6]}."
        call: dict[str, Any] = {"model": model} if model else {"model": "tiny", "prompt": prompt}
        job_id = uuid()
        canvas_jobs.append(job_id)
        fixed = {"max_tokens": self._args.new, "temperature": 0, "ignore_eos": True, "logprobs": self._logprobs}
        return generate.s(**call, stream=(place + self._number) % 2 == 0, **fixed, **params).set(task_id=job_id)

    def _plain(self, kind: str, name: str) -> Canvas:
        jobs: list[str] = []
        return Canvas(kind, name, self._job(jobs), jobs)

    def _link(self, kind: str, name: str) -> Canvas:
        from .steps_app import after_job

        jobs: list[str] = []
        sends = self._job(jobs)
        sends.link(after_job.s(name))
        return Canvas(kind, name, sends, jobs, steps={name: 1})

    def _link_error(self, kind: str, name: str) -> Canvas:
        from .steps_app import after_failure

        failing: list[str] = []
        sends = self._job(failing, grammar=WRONG_GRAMMAR)
        sends.link_error(after_failure.s(name))
        return Canvas(kind, name, sends, failing=failing, steps={name: 1})

    def _chain(self, kind: str, name: str) -> Canvas:
        from .steps_app import after_job

        jobs: list[str] = []
        last = after_job.s(name).set(task_id=uuid())
        sends = chain(self._job(jobs), self._job(jobs, model="tiny"), last)
        return Canvas(kind, name, sends, jobs, steps={name: 1}, results=[last.id])

    def _broken_chain(self, kind: str, name: str) -> Canvas:
        """Return a chain whose first job fails. The other jobs never run and count as failed."""
        from .steps_app import after_failure, after_job

        failing: list[str] = []
        never: list[str] = []
        last = after_job.s(name).set(task_id=uuid())
        first = self._job(failing, grammar=WRONG_GRAMMAR)
        first.link_error(after_failure.s(f"{name} errback"))
        sends = chain(first, self._job(never, model="tiny"), last)
        return Canvas(
            kind, name, sends, failing=failing, steps={name: 0, f"{name} errback": 1}, results=[*never, last.id]
        )

    def _chord(self, kind: str, name: str) -> Canvas:
        from .steps_app import after_parts

        jobs: list[str] = []
        body = after_parts.s(name).set(task_id=uuid())
        parts = [self._job(jobs) for _ in range(self._args.chord)]
        return Canvas(
            kind,
            name,
            chord(parts, body),
            jobs,
            steps={name: 1},
            results=[body.id],
            chord_body=body.id,
            num_parts=len(parts),
        )

    def _broken_chord(self, kind: str, name: str) -> Canvas:
        """Return a chord with a failing part. The chord's body never runs, but its errback does."""
        from .steps_app import after_failure, after_parts

        jobs: list[str] = []
        failing: list[str] = []
        body = after_parts.s(name).set(task_id=uuid())
        body.link_error(after_failure.s(f"{name} errback"))
        parts = [self._job(jobs), self._job(failing, grammar=WRONG_GRAMMAR), self._job(jobs)]
        steps = {name: 0, f"{name} errback": 1}
        return Canvas(
            kind,
            name,
            chord(parts, body),
            jobs,
            failing,
            steps,
            results=[body.id],
            chord_body=body.id,
        )


class CanvasScenario:
    """Runs canvases on a service. A worker of another app runs the next steps."""

    def __init__(self, service: Service, args: argparse.Namespace) -> None:
        self._service = service
        self._args = args
        self._deaths: Counter[int] = Counter()  # numbers of dead workers by exit code
        self._closing = threading.Event()

    def canvas(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Run canvases of all kinds while workers are killed, and return rows and violations."""
        planned = [(kind, "") for _ in range(self._args.canvases) for kind in KINDS]
        return self._run("canvas", planned, self._all_at_once, self._kill_at_any_moment)

    def ends(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Kill a worker at a chosen point after the end of each marked job, and return rows and violations."""
        ends = [(kind, point) for kind, point in ENDS if point in self._args.points]
        planned = list(islice(cycle(ends), self._args.ends))
        random.Random(self._args.seed).shuffle(planned)
        return self._run("ends", planned, self._until_all_kill, self._restart_dead)

    def _run(
        self,
        scenario: str,
        planned: Sequence[tuple[str, str]],
        send: Callable[[Sequence[tuple[str, str]]], list[Canvas]],
        trouble: Callable[[], None],
    ) -> tuple[list[dict[str, Any]], list[str]]:
        redis = self._service.redis
        options = ("-P", "solo", "--without-gossip", "--without-mingle", "--without-heartbeat")
        app = f"{__package__}.steps_app"
        with celery_worker(app, "steps", self._service.folder, *options, environment={}):
            undisturbed = self._undisturbed(planned)
            started = time.monotonic()
            with self._service.counting_results() as stored:
                thread = threading.Thread(target=trouble)
                thread.start()
                try:
                    canvases = send(planned)
                finally:
                    self._closing.set()
                    thread.join()
                seconds = time.monotonic() - started
        kills = fatal_points.used(self._service.fatal_points)
        check = _CanvasCheck(redis, canvases, undisturbed, stored.states, scenario)
        row: dict[str, Any] = {
            "scenario": scenario,
            "kills": self._deaths[-signal.SIGKILL],
            "canvases": len(canvases),
            "seconds": round(seconds, 1),
            **check.row(),
        }
        wrong = check.wrong(row)
        if scenario == "ends" and not len(kills) == len(planned) == row["kills"]:
            wrong.append(
                f"ends: {len(planned)} kills were planned, {len(kills)} marks used, and {row['kills']} workers died"
            )
        wrong += [f"{scenario}: a worker exited with {code}" for code in self._deaths if code != -signal.SIGKILL]
        points = check.by_point(kills) if scenario == "ends" else []
        return [shown(row), *map(shown, points)], wrong

    def _undisturbed(self, planned: Sequence[tuple[str, str]]) -> dict[tuple[int, int], ReferenceText]:
        """Return each job's text from an undisturbed run, keyed by canvas number and position."""
        builder = Builder(self._args, LOGPROBS)
        canvases = [builder.build(number, kind, "undisturbed") for number, (kind, _) in enumerate(planned)]
        self._send(canvases)
        places = [(canvas.number, place) for canvas in canvases for place in range(len(canvas.jobs))]
        found = metas(self._service.redis, [job_id for canvas in canvases for job_id in canvas.jobs])
        missing: list[Any] = [
            place for place, meta in zip(places, found, strict=True) if meta.get("status") != states.SUCCESS
        ]
        missing += _CanvasCheck(self._service.redis, canvases, {}, {}).missing_steps()
        if missing:
            raise RuntimeError(f"canvases did not complete in the undisturbed run; missing jobs and steps: {missing}")
        return dict(zip(places, reference_texts([meta["result"] for meta in found], SOURCE), strict=True))

    def _all_at_once(self, planned: Sequence[tuple[str, str]]) -> list[Canvas]:
        builder = Builder(self._args)
        canvases = [builder.build(number, kind, point) for number, (kind, point) in enumerate(planned)]
        random.Random(self._args.seed).shuffle(canvases)
        self._send(canvases)
        return canvases

    def _until_all_kill(self, planned: Sequence[tuple[str, str]]) -> list[Canvas]:
        """Send a few marked canvases at a time, and repeat each canvas whose mark has not killed a worker."""
        builder = Builder(self._args)
        directory = self._service.fatal_points
        sent: list[Canvas] = []
        left = [(number, *plan) for number, plan in enumerate(planned)]
        for again in range(MOST_ROUNDS):
            canvases = [builder.build(*plan, again) for plan in left]
            for first in range(0, len(canvases), AT_ONCE):
                group = canvases[first : first + AT_ONCE]
                for canvas in group:
                    fatal_points.mark(directory, canvas.point, canvas.marked_id())
                self._send(group)
                for canvas in group:
                    fatal_points.unmark(directory, canvas.point, canvas.marked_id())
            used = fatal_points.used(directory)
            left = [
                plan
                for plan, canvas in zip(left, canvases, strict=True)
                if (canvas.point, canvas.marked_id()) not in used
            ]
            sent += canvases
        return sent

    def _send(self, canvases: Sequence[Canvas]) -> None:
        """Send canvases, and wait until all of them have completed or results stop arriving."""
        for canvas in canvases:
            canvas.sends.apply_async()
        self._wait(canvases)

    def _wait(self, canvases: Sequence[Canvas]) -> None:
        """Wait until all results have arrived, or no result has arrived for a while."""
        redis = self._service.redis
        ids = [job_id for canvas in canvases for job_id in (*canvas.jobs, *canvas.failing)]
        results = [result for canvas in canvases for result in canvas.results]
        num_steps = sum(len(canvas.steps) for canvas in canvases)
        expected = len(ids) * 2 + len(results) + num_steps

        def num_seen() -> int:
            ended = of_jobs(redis, ids, "state").count(b"done")
            stored = sum(map(has_final_state, metas(redis, ids + results)))
            return ended + stored + num_steps - len(_CanvasCheck(redis, canvases, {}, {}).missing_steps())

        wait_until_quiet(num_seen, lambda num: num == expected and is_clean(redis, ids), QUIET_S)

    # Disturbances

    def _kill_at_any_moment(self) -> None:
        chance = random.Random(self._args.seed)
        while self._deaths.total() < self._args.kills and not self._closing.wait(self._args.period):
            name = chance.choice(sorted(self._service.processes))
            self._service.kill(name)
            self._note_death(name)

    def _restart_dead(self) -> None:
        while not self._closing.wait(0.05):
            for name, process in list(self._service.processes.items()):
                if process.poll() is not None:
                    self._note_death(name)

    def _note_death(self, name: str) -> None:
        self._deaths[self._service.processes[name].returncode] += 1
        self._service.start_worker(name)


class _CanvasCheck:
    """The outcomes of the canvases, read from Redis."""

    def __init__(
        self,
        redis: Any,
        canvases: Sequence[Canvas],
        undisturbed: Mapping[tuple[int, int], ReferenceText],
        stored: Mapping[str, Sequence[str]],
        scenario: str = "",
    ) -> None:
        from .steps_app import PARTS_KEY, RUNS_KEY

        self._redis = redis
        self._canvases = canvases
        self._undisturbed = undisturbed
        self._stored = stored
        self._scenario = scenario
        self._runs = {name.decode(): int(count) for name, count in redis.hgetall(RUNS_KEY).items()}
        self._parts = {name.decode(): int(count) for name, count in redis.hgetall(PARTS_KEY).items()}

    def missing_steps(self) -> list[str]:
        """Return a line for each step that ran less often than expected, with actual and expected numbers of runs."""
        steps = [step for canvas in self._canvases for step in canvas.steps.items()]
        return [f"{name}: {ran} of {times}" for name, times in steps if (ran := self._runs.get(name, 0)) < times]

    def row(self) -> dict[str, Any]:
        ids = [job_id for canvas in self._canvases for job_id in (*canvas.jobs, *canvas.failing)]
        chords = [canvas for canvas in self._canvases if canvas.chord_body]
        texts = self._texts()
        bodies = [canvas for canvas in self._canvases if canvas.kind == "chord"]
        return {
            **ends_row(self._redis, ids, self._stored),
            "torn": self._num_torn(),
            "texts off": texts["other"],
            "texts tied": texts["tied"],
            "steps": sum(sum(canvas.steps.values()) for canvas in self._canvases),
            "steps lost": sum(map(self._num_lost, self._canvases)),
            "steps twice": sum(map(self._num_twice, self._canvases)),
            "chords": len(chords),
            "bodies once": sum(
                self._runs.get(canvas.name, 0) == 1 and self._parts.get(canvas.name) == canvas.num_parts
                for canvas in bodies
            )
            + sum(self._runs.get(canvas.name, 0) == 0 for canvas in chords if canvas.kind != "chord"),
        }

    def wrong(self, row: Mapping[str, Any]) -> list[str]:
        """Return a line for each guarantee that the figures in `row` violate."""
        none = ("stored otherwise", "torn", "texts off", "steps lost")
        lines = broken_promises(self._scenario, row, ("ended once", "stored"), none)
        if row["bodies once"] != row["chords"]:
            lines.append(f"{self._scenario}: {row['bodies once']} of {row['chords']} chords completed once")
        lines += [f"{self._scenario}: lost: {canvas.name}" for canvas in self._canvases if self._num_lost(canvas)]
        return lines

    def by_point(self, kills: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
        """Return a row for each kill point, with the numbers of killed workers, lost steps and repeated steps."""
        used = Counter(point for point, _ in kills)
        rows = []
        for point in fatal_points.POINTS:
            canvases = [canvas for canvas in self._canvases if canvas.point == point]
            if canvases:
                lost, twice = (sum(map(count, canvases)) for count in (self._num_lost, self._num_twice))
                rows.append({"point": point, "kills": used[point], "steps lost": lost, "steps twice": twice})
        return rows

    def _num_lost(self, canvas: Canvas) -> int:
        """Return the number of steps and results that never arrived."""
        steps = sum(self._runs.get(name, 0) < times for name, times in canvas.steps.items())
        return steps + sum(not has_final_state(meta) for meta in metas(self._redis, canvas.results))

    def _num_twice(self, canvas: Canvas) -> int:
        """Return the number of step runs beyond the expected number."""
        return sum(max(0, self._runs.get(name, 0) - times) for name, times in canvas.steps.items())

    def _texts(self) -> Counter[str]:
        kinds: Counter[str] = Counter()
        for canvas in self._canvases:
            before = "same"
            for place, meta in enumerate(metas(self._redis, canvas.jobs)):
                text = (meta.get("result") or {}).get("text", "")
                if canvas.kind == "chain" and before == "tied":  # the prompt was different
                    kind = "tied"
                else:
                    kind = compare_text(canvas.jobs[place], text, self._undisturbed[canvas.number, place])
                kinds[kind] += 1
                before = kind
        return kinds

    def _num_torn(self) -> int:
        """Return the number of jobs whose text differs from their journal."""
        return sum(
            not is_whole(journal_of(self._redis, job_id), (meta.get("result") or {}).get("text", ""))
            for canvas in self._canvases
            for job_id, meta in zip(canvas.jobs, metas(self._redis, canvas.jobs), strict=True)
        )
