"""The commands that read prompts: generate, chat, prefill."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.prompt import Prompt

from cellama.api.client.client import Client, Job
from cellama.tasks.contract.errors import InvalidJob, JobError
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.contract.kinds.generate import GenerateJob
from cellama.tasks.contract.kinds.prefill import PrefillJob
from cellama.tasks.contract.shapes.parameters import ChatMessage

from .following import SilenceTimeout, cancelled_with, result_of, show
from .options import with_options
from .output import out, print_error, print_json

CHAT_HELP = """\
[dim]What you write goes to the model, and its answers are part of the conversation.
  /help         this
  /exit         end the conversation, as Ctrl-D does
  Ctrl-C        while an answer comes: cancel it, and go on[/]"""
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON lines for machines.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Queue the job even if no worker serves the model now.")]
PatienceOption = Annotated[float, typer.Option("--patience", help="Seconds without a word from a job that has a slot.")]


@with_options(GenerateJob)
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
        _run(client.generate(model, _read(prompt), wait=wait, **params), json, patience, wait)


@with_options(ChatJob)
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
    messages: list[ChatMessage] = [{"role": "system", "content": system}] if system else []
    with Client() as client:
        if message is not None or not sys.stdin.isatty():
            messages.append({"role": "user", "content": _read(message or "-")})
            _run(client.chat(model, messages, wait=wait, **params), json, patience, wait)
            return
        if "parent_key" in params:
            raise InvalidJob("--parent-key goes with one message; give it, a conversation here begins anew")
        out.print(f"[dim]Chatting with {model}. /help says what there is; Ctrl-D ends it.[/]")
        while (said := _ask()) is not None:
            _take_turn(client, messages, said, model, json, patience, wait, params)


@with_options(PrefillJob)
def prefill_command(
    model: Annotated[str, typer.Argument(help="Model id, or :default.")],
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from stdin.")] = None,
    system: Annotated[str | None, typer.Option(help="Instead of a prompt: the system message of chats.")] = None,
    json: JsonOption = False,
    wait: WaitOption = False,
    patience: PatienceOption = 60.0,
    params: dict[str, Any] = {},  # noqa: B006  (filled by the decorator)
) -> None:
    """Read into the cache what later jobs begin with, and show its key.

    Example:  cellama prefill tiny "Once upon a time, in a land far away,"

    To continue it:  cellama generate tiny " there was" --parent-key KEY
    """
    given: dict[str, Any] = {"system": system} if system is not None else {}
    with Client() as client:
        job = client.prefill(model, None if prompt is None else _read(prompt), wait=wait, **given, **params)
        result = result_of(job, SilenceTimeout(job.id, patience, unserved=wait))
    if json:
        print_json({"job_id": job.id, **result})
        return
    usage = result["usage"]
    where = "" if not usage["cached_tokens"] else f" ({usage['cached_tokens']} were in the cache)"
    out.print(f"read {usage['prompt_tokens']} tokens{where}\n{result.get('finish_key', '')}", soft_wrap=True)


def _read(text: str) -> str:
    if text != "-":
        return text
    try:
        return sys.stdin.buffer.read().decode("utf-8").rstrip("\n")
    except UnicodeDecodeError as error:
        raise InvalidJob(f"stdin is not valid UTF-8 at byte {error.start}; convert it first") from None


def _run(job: Job[Any], json: bool, patience_s: float, wait: bool) -> str:
    with cancelled_with(job):
        return show(job, json, SilenceTimeout(job.id, patience_s, unserved=wait))


def _take_turn(
    client: Client,
    messages: list[ChatMessage],
    said: str,
    model: str,
    json: bool,
    patience_s: float,
    wait: bool,
    params: dict[str, Any],
) -> None:
    """What was said and its answer are part of the conversation; if there is no answer, neither is."""
    turn: ChatMessage = {"role": "user", "content": said}
    try:
        answer = _run(client.chat(model, [*messages, turn], wait=wait, **params), json, patience_s, wait)
    except KeyboardInterrupt:
        return
    except JobError as error:
        print_error(f"{error}\nthe conversation goes on without that; say it otherwise, or /exit")
        return
    messages += [turn, {"role": "assistant", "content": answer}]


def _ask() -> str | None:
    """What a person says, which is never empty; None at the end of the conversation."""
    while True:
        try:
            said = Prompt.ask("[bold green]you[/]", console=out).strip()
        except EOFError:
            return None
        if said in ("/exit", "/quit"):
            return None
        if said.startswith("/") and " " not in said:
            out.print(CHAT_HELP)
        elif said:
            return said


COMMANDS: dict[str, Callable[..., None]] = {
    "generate": generate_command,
    "chat": chat_command,
    "prefill": prefill_command,
}
