"""The commands that generate text: generate, chat."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.prompt import Prompt

from cellama.api.client.client import Client, Job
from cellama.tasks.contract.errors import InvalidJob, JobCancelled, JobFailed
from cellama.tasks.contract.events import Event
from cellama.tasks.state.position import Position
from cellama.tasks.state.reader import PING

from .options import with_chat_options, with_generation_options
from .output import err, out, print_json

PING_S = 1.0
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON lines for machines.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Queue the job even if nobody serves the model now.")]
PatienceOption = Annotated[float, typer.Option("--patience", help="Seconds to wait for the next event.")]


@with_generation_options
def generate_command(
    model: Annotated[str, typer.Argument(help="Model id, or :default.")],
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    json: JsonOption = False,
    wait: WaitOption = False,
    patience: PatienceOption = 60.0,
    params: dict[str, Any] = {},  # noqa: B006  (filled by the decorator)
) -> None:
    """Continue a prompt, streaming the text.

    Example:  cellama generate tiny "Once upon a time" --max-tokens 80 --temperature 0
    """
    with Client() as client:
        _show(client.generate(model, _read(prompt), wait=wait, **params), json, patience)


@with_chat_options
def chat_command(
    model: Annotated[str, typer.Argument(help="Model id, or :default.")],
    message: Annotated[str | None, typer.Argument(help="What to say; without it, a conversation begins.")] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    json: JsonOption = False,
    wait: WaitOption = False,
    patience: PatienceOption = 60.0,
    params: dict[str, Any] = {},  # noqa: B006  (filled by the decorator)
) -> None:
    """Chat with a model: one answer, or a conversation when no message is given (/exit ends it).

    Example:  cellama chat tiny "What is the capital of France?" --enable-thinking

    Tools are a JSON list in the OpenAI form:  --tools @tools.json
    """
    messages = [{"role": "system", "content": system}] if system else []
    with Client() as client:
        if message is not None or not sys.stdin.isatty():
            messages.append({"role": "user", "content": _read(message or "-")})
            _show(client.chat(model, messages, wait=wait, **params), json, patience)
            return
        out.print(f"[dim]Chatting with {model}. /exit or Ctrl-D ends it.[/]")
        while (said := _ask()) is not None:
            messages.append({"role": "user", "content": said})
            answer = _show(client.chat(model, messages, wait=wait, **params), json, patience)
            messages.append({"role": "assistant", "content": answer})


def _read(text: str) -> str:
    if text != "-":
        return text
    try:
        return sys.stdin.buffer.read().decode("utf-8").rstrip("\n")
    except UnicodeDecodeError as error:
        raise InvalidJob(f"stdin is not valid UTF-8 at byte {error.start}; convert it first") from None


def _ask() -> str | None:
    try:
        said = Prompt.ask("[bold green]you[/]", console=out)
    except EOFError:
        return None
    return None if said.strip() in ("/exit", "/quit") else said


def _show(job: Job, json: bool, patience_s: float) -> str:
    """Streams a job to stdout and returns its text. Ctrl-C, or a reader that goes away, cancels the job."""
    text = ""
    try:
        for event in _with_spinner(job, job.stream(timeout=patience_s, ping=PING_S)):
            text += event["text"] if event["type"] == "token" else ""
            if json:
                print_json({"job_id": job.id, **event})
            else:
                _show_event(event)
            _raise_if_failed(event, job.id)
    except (KeyboardInterrupt, BrokenPipeError):
        job.cancel()
        err.print(f"\n[yellow]cancelled job {job.id}[/]")
        raise
    return text


def _show_event(event: Event) -> None:
    """The answer goes to stdout, thoughts and the summary to stderr."""
    if event["type"] == "token":
        sys.stdout.write(event["text"])
        sys.stdout.flush()
    elif event["type"] == "reasoning":
        err.print(event["text"], style="dim italic", end="", markup=False, highlight=False, soft_wrap=True)
    elif event["type"] == "reasoning_end":
        err.print("\n")
    elif event["type"] == "done":
        for call in event.get("tool_calls", []):
            sys.stdout.write(f"{call['function']['name']}({call['function']['arguments']})")
        _summarise(event)


def _with_spinner(job: Job, events: Iterator[Event]) -> Iterator[Event]:
    """The events without the pings; while those come, stderr shows where the job is."""
    with err.status("…") as spinner:
        spinner.stop()
        for event in events:
            if event["type"] != PING:
                spinner.stop()
                yield event
                continue
            spinner.update(_describe(job.position()))
            spinner.start()


def _describe(position: Position) -> str:
    if position.state != "waiting":
        return "[dim]the prompt is being read …[/]"
    when = "no worker serves it now" if position.eta_s is None else f"about {position.eta_s:.0f} s"
    return f"[dim]waiting: {position.ahead} job(s) ahead, {when}[/]"


def _raise_if_failed(event: Event, job_id: str) -> None:
    if event["type"] == "error":
        raise JobFailed(event["code"], event["message"], event["retryable"])
    if event.get("finish_reason") == "cancelled":
        raise JobCancelled(f"job {job_id} was cancelled")


def _summarise(event: Event) -> None:
    sys.stdout.write("\n")
    sys.stdout.flush()
    usage, timings = event["usage"], event["timings"]
    parts = [f"{usage['completion_tokens']} tokens", event["finish_reason"]]
    if timings["generation_rate"]:
        parts.append(f"{timings['generation_rate']:.0f} tok/s")
    if timings["ttft_ms"] is not None:
        parts.append(f"first after {timings['ttft_ms']:.0f} ms")
    err.print(f"[dim]{' · '.join(parts)}[/]")
