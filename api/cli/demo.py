"""`cellama demo`: run a Redis server, a worker with the bundled model and a producer, and show their output."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.rule import Rule

from cellama.api.client.client import Client, Job
from cellama.api.machine.redis_server import RedisServer
from cellama.api.machine.supervisor import Supervisor, worker_child
from cellama.tasks import generate
from cellama.tasks.contract.codes import Exit
from cellama.tasks.contract.names import PRIORITY_BULK

from .output import called, err, out
from .services import check_installed, wait_for_worker

NUM_BULK_JOBS = 48  # several times the slots of the bundled model, so that slots are reused
JOB_TIMEOUT_S = 60.0  # enough for a slow machine
POLL_S = 0.05  # between two checks of the producer process
MODEL = "tiny"
ANIMALS = ("fox", "bear", "cat", "frog", "mouse", "dragon")
NEXT_STEPS = """\
[bold]Where to go next[/]
  cellama up                           run everything on this machine
  cellama chat tiny "Who are you?"     chat, in another terminal
  cellama up -m chat=/path/to/my.gguf  serve your own model
  cellama --help                       list all commands"""


def demo_command() -> None:
    """Run a demo of cellama: start Redis and a worker, stream generated text, chat, and run jobs in bulk.

    Example:  cellama demo
    """
    check_installed()
    with tempfile.TemporaryDirectory(prefix="cellama-demo-") as folder:
        _prepare_environment(Path(folder))
        with RedisServer.start(Path(folder) / "redis") as redis:
            os.environ["CELLAMA_REDIS_URL"] = redis.url
            out.print(f"[green]✓[/] Redis on port {redis.port}, with an append-only file (pid {redis.pid})")
            supervisor = Supervisor([worker_child(log_path=Path(folder) / "worker.log")])
            with supervisor.handling_signals():
                supervisor.start()
                try:
                    code = _produce(redis, supervisor)
                finally:
                    supervisor.stop()
    if code:
        raise typer.Exit(Exit.FAILED)
    out.print(NEXT_STEPS.format(called()))


def _prepare_environment(folder: Path) -> None:
    """Remove this shell's cellama settings from the environment so that the demo always runs the same way."""
    for name in [name for name in os.environ if name.startswith("CELLAMA_")]:
        del os.environ[name]
    (folder / "cellama.toml").write_text("")
    os.environ["CELLAMA_CONFIG"] = str(folder / "cellama.toml")


def _produce(redis: RedisServer, supervisor: Supervisor) -> int:
    worker = supervisor.children[0]
    wait_for_worker(redis.url, worker, supervisor)
    assert worker.process is not None
    out.print(f"[green]✓[/] a Celery worker with the bundled model (pid {worker.process.pid})")
    argv = [sys.executable, "-c", "from cellama.api.cli.demo import main; main()"]
    producer = subprocess.Popen(
        argv, start_new_session=True
    )  # only this process handles Ctrl-C, and it stops all others
    out.print(f"[green]✓[/] a producer process (pid {producer.pid})")
    try:
        while (code := producer.poll()) is None:
            supervisor.check()
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        producer.kill()
        producer.wait()
        raise
    if code:
        err.print(f"the producer exited with code {code}; end of the worker's log:\n{worker.log_tail()}", markup=False)
    return code


def main() -> None:
    """Run the producer process, which connects only to Redis."""
    with Client() as client:
        _stream(client)
        _chat(client)
        _bulk(client)


def _stream(client: Client) -> None:
    out.print(Rule("1. One job, streamed token by token", align="left"))
    job = client.generate(MODEL, "Once upon a time", temperature=0, max_tokens=200)
    out.print("[bold]Once upon a time[/]", end="")
    _print_stream(job)


def _print_stream(job: Job) -> None:
    for event in job.stream(timeout=JOB_TIMEOUT_S):
        if event["type"] == "token":
            sys.stdout.write(event["text"])
            sys.stdout.flush()
        elif event["type"] == "error":
            sys.exit(f"\nthe job failed: {event['message']}")
        elif event["type"] == "done":
            rate = event["timings"]["generation_rate"] or 0
            out.print(f"\n[dim]{event['usage']['completion_tokens']} tokens, {rate:.0f} tokens per second[/]")


def _chat(client: Client) -> None:
    out.print(Rule("2. One chat message", align="left"))
    question = "What is the capital of France?"
    out.print(f"[bold]user[/]       {question}\n[bold]assistant[/]  ", end="")
    _print_stream(client.chat(MODEL, [{"role": "user", "content": question}], temperature=0))


def _bulk(client: Client) -> None:
    out.print(Rule(f"3. {NUM_BULK_JOBS} jobs at the same time", align="left"))
    animals = itertools.islice(itertools.cycle(ANIMALS), NUM_BULK_JOBS)
    started = time.monotonic()
    jobs = [
        generate.delay(
            MODEL, f"Once upon a time, there was a little {animal}", temperature=0, stream=False, priority=PRIORITY_BULK
        )
        for animal in animals
    ]
    tokens = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out) as progress:
        task = progress.add_task("lines", total=len(jobs))
        for job in jobs:
            usage = job.get(timeout=JOB_TIMEOUT_S)["usage"]
            tokens += usage["completion_tokens"]
            progress.advance(task)
    seconds = time.monotonic() - started
    out.print(
        f"[green]✓[/] {len(jobs)} lines, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens per second"
    )
    _show_batching(client, NUM_BULK_JOBS)


def _show_batching(client: Client, num_requests: int) -> None:
    """Wait until the worker's heartbeat includes all requests, then print how many steps the worker needed."""
    deadline = time.monotonic() + JOB_TIMEOUT_S
    while time.monotonic() < deadline:
        for worker in client.workers():
            engine = worker.models[0]["engine"]
            if engine and engine["requests_finished"] >= num_requests:
                per_step = engine["generated_tokens"] / engine["steps"]
                out.print(
                    f"[green]✓[/] {engine['slots_total']} slots, {engine['steps']} steps, "
                    f"{engine['mixed_steps']} of which mix decode and prefill, {per_step:.1f} tokens per step"
                )
                return
        time.sleep(0.1)
    sys.exit("no heartbeat of the worker includes all requests; check the worker's log")
