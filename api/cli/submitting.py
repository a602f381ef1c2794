"""The commands `generate`, `chat`, `prefill`, `embed` and `rerank`, which submit one job and wait for its result."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.prompt import Prompt
from rich.table import Table

from cellama.api.client.client import Client, Job
from cellama.tasks.contract.errors import InvalidJob, JobError
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.contract.kinds.generate import GenerateJob
from cellama.tasks.contract.kinds.prefill import PrefillJob
from cellama.tasks.contract.kinds.rerank import Ranked
from cellama.tasks.contract.shapes.parameters import ChatMessage

from .following import SilenceTimeout, cancelled_with, result_of, show
from .options import FairnessKeyOption, JsonOption, PatienceOption, WaitOption, with_options
from .output import out, print_error, print_json, table_of

CHAT_HELP = """\
[dim]Type a message and press Enter. The model sees the whole conversation.
  /help         show this help
  /exit         end the conversation (also Ctrl-D)
  Ctrl-C        cancel the answer and keep chatting[/]"""
MAX_SHOWN_NUMBERS = 6  # numbers shown of a vector, enough to see that vectors differ


@with_options(GenerateJob)
def generate_command(
    model: Annotated[str, typer.Argument(help="Model id, or :default.")],
    prompt: Annotated[str, typer.Argument(help="Prompt, or - to read it from stdin.")],
    json: JsonOption = False,
    wait: WaitOption = False,
    fairness_key: FairnessKeyOption = None,
    patience: PatienceOption = 60.0,
    params: dict[str, Any] = {},  # noqa: B006  (filled by the decorator)
) -> None:
    """Continue a prompt and stream the generated text.

    Example:  cellama generate tiny "Once upon a time" --max-tokens 80
    """
    with Client() as client:
        job = client.generate(model, _read(prompt), wait=wait, fairness_key=fairness_key, **params)
        _run(job, json, patience, wait)


@with_options(ChatJob)
def chat_command(
    model: Annotated[str, typer.Argument(help="Model id, or :default.")],
    message: Annotated[
        str | None, typer.Argument(help="User message, or - to read it from stdin (default: start a conversation).")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    json: JsonOption = False,
    wait: WaitOption = False,
    fairness_key: FairnessKeyOption = None,
    patience: PatienceOption = 60.0,
    params: dict[str, Any] = {},  # noqa: B006  (filled by the decorator)
) -> None:
    """Send one chat message, or start a conversation if no message is given.

    Example:  cellama chat tiny "What is the capital of France?"

    To pass tools, specify a JSON file in OpenAI's format: --tools @tools.json
    """
    messages: list[ChatMessage] = [{"role": "system", "content": system}] if system else []
    params = {**params, "fairness_key": fairness_key}
    with Client() as client:
        if message is not None or not sys.stdin.isatty():
            messages.append({"role": "user", "content": _read(message or "-")})
            _run(client.chat(model, messages, wait=wait, **params), json, patience, wait)
            return
        if "parent_key" in params:
            raise InvalidJob("--parent-key requires a message; an interactive conversation always starts from scratch")
        out.print(f"[dim]Chatting with {escape(model)}. Type /help for help, Ctrl-D to exit.[/]")
        while (text := _read_message()) is not None:
            _take_turn(client, messages, text, model, json, patience, wait, params)


@with_options(PrefillJob)
def prefill_command(
    model: Annotated[str, typer.Argument(help="Model id, or :default.")],
    prompt: Annotated[str | None, typer.Argument(help="Prompt, or - to read it from stdin.")] = None,
    system: Annotated[
        str | None, typer.Option(help="System message to prefill for later chats, instead of a prompt.")
    ] = None,
    json: JsonOption = False,
    wait: WaitOption = False,
    fairness_key: FairnessKeyOption = None,
    patience: PatienceOption = 60.0,
    params: dict[str, Any] = {},  # noqa: B006  (filled by the decorator)
) -> None:
    """Prefill a prefix into the cache for later jobs, and print its key.

    Example:  cellama prefill tiny "Once upon a time, in a land far away,"

    To continue the prefix:  cellama generate tiny " there was" --parent-key KEY
    """
    given: dict[str, Any] = {"fairness_key": fairness_key, **({} if system is None else {"system": system})}
    with Client() as client:
        job = client.prefill(model, None if prompt is None else _read(prompt), wait=wait, **given, **params)
        result = result_of(job, SilenceTimeout(job.id, patience, allow_unserved=wait))
    if json:
        print_json({"job_id": job.id, **result})
        return
    usage = result["usage"]
    cached = "" if not usage["cached_tokens"] else f" ({usage['cached_tokens']} were cached)"
    out.print(f"prefilled {usage['prompt_tokens']} tokens{cached}\n{result.get('finish_key', '')}", soft_wrap=True)


def embed_command(
    model: Annotated[str, typer.Argument(help="Model id, or :default.")],
    texts: Annotated[list[str], typer.Argument(help="Texts to embed, or - to read one text per line from stdin.")],
    dimensions: Annotated[
        int | None, typer.Option(help="Number of dimensions to keep in each vector (default: all).")
    ] = None,
    normalize: Annotated[bool, typer.Option(help="Scale vectors to unit length.")] = True,
    truncate: Annotated[bool, typer.Option(help="Truncate overlong texts instead of rejecting them.")] = False,
    json: JsonOption = False,
    wait: WaitOption = False,
    fairness_key: FairnessKeyOption = None,
    patience: PatienceOption = 60.0,
) -> None:
    """Compute embeddings for texts.

    Example:  cellama embed tiny "a red fox" "a green frog" --json
    """
    texts = _read_lines(texts)
    with Client() as client:
        given: dict[str, Any] = {"dimensions": dimensions, "normalize": normalize, "truncate": truncate}
        job = client.embed(model, texts, wait=wait, fairness_key=fairness_key, **given)
        result = result_of(job, SilenceTimeout(job.id, patience, allow_unserved=wait))
    if json:
        print_json(result)
        return
    embeddings: list[Any] = [*result["embeddings"]]
    for text, embedding in zip(texts, embeddings, strict=True):
        per_token = isinstance(embedding[0], list)
        head = ", ".join(f"{value:.4f}" for value in (embedding[0] if per_token else embedding)[:MAX_SHOWN_NUMBERS])
        size = f"{len(embedding)} tokens of {len(embedding[0])}" if per_token else str(len(embedding))
        out.print(f"{text!r}: [{head}, …] ({size} dimensions)", markup=False)


def rerank_command(
    model: Annotated[str, typer.Argument(help="Model id, or :default.")],
    query: Annotated[str, typer.Argument(help="Query to rank the documents by.")],
    documents: Annotated[
        list[str], typer.Argument(help="Documents to rank, or - to read one document per line from stdin.")
    ],
    top_n: Annotated[int | None, typer.Option(help="Number of documents to show, best first (default: all).")] = None,
    truncate: Annotated[bool, typer.Option(help="Truncate overlong documents instead of rejecting them.")] = False,
    json: JsonOption = False,
    wait: WaitOption = False,
    fairness_key: FairnessKeyOption = None,
    patience: PatienceOption = 60.0,
) -> None:
    """Rank documents by their relevance to a query.

    Example:  cellama rerank reranker "what eats frogs?" "a fox" "a stork"
    """
    documents = _read_lines(documents)
    with Client() as client:
        given: dict[str, Any] = {"top_n": top_n, "truncate": truncate}
        job = client.rerank(model, query, documents, wait=wait, fairness_key=fairness_key, **given)
        result = result_of(job, SilenceTimeout(job.id, patience, allow_unserved=wait))
    if json:
        print_json(result)
        return
    out.print(_ranking(documents, result["results"]))


def _ranking(documents: list[str], results: list[Ranked]) -> Table:
    table = table_of("score", "index", "document", right="score, index")
    for entry in results:
        table.add_row(f"{entry['score']:.4f}", str(entry["index"]), escape(repr(documents[entry["index"]])))
    return table


def _read(text: str) -> str:
    """Return the text, or read it from stdin if the argument is "-". Raises InvalidJob."""
    return _read_stdin().rstrip("\n") if text == "-" else text


def _read_lines(texts: list[str]) -> list[str]:
    """Return the texts, or the lines of stdin if the only argument is "-". Raises InvalidJob."""
    return _read_stdin().splitlines() if texts == ["-"] else texts


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidJob(f"stdin is not valid UTF-8 at byte {error.start}; convert it to UTF-8") from None


def _run(job: Job[Any], json: bool, patience_s: float, wait: bool) -> str:
    with cancelled_with(job):
        return show(job, json, SilenceTimeout(job.id, patience_s, allow_unserved=wait))


def _take_turn(
    client: Client,
    messages: list[ChatMessage],
    text: str,
    model: str,
    json: bool,
    patience_s: float,
    wait: bool,
    params: dict[str, Any],
) -> None:
    """Send a message, and add the message and its answer to the conversation.

    If there is no answer, leave the conversation unchanged.
    """
    turn: ChatMessage = {"role": "user", "content": text}
    try:
        answer = _run(client.chat(model, [*messages, turn], wait=wait, **params), json, patience_s, wait)
    except KeyboardInterrupt:
        return
    except JobError as error:
        print_error(f"{error}\nthis message is not part of the conversation; rephrase it, or type /exit")
        return
    messages += [turn, {"role": "assistant", "content": answer}]


def _read_message() -> str | None:
    """Return the user's next nonempty message, or None at the end of the conversation."""
    while True:
        try:
            text = Prompt.ask("[bold green]you[/]", console=out).strip()
        except EOFError:
            return None
        if text in ("/exit", "/quit"):
            return None
        if text.startswith("/") and " " not in text:
            out.print(CHAT_HELP)
        elif text:
            return text
