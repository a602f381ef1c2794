"""The commands that read texts and give numbers: embed, rerank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from cellama.api.client.client import Client
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.kinds.rerank import Ranked

from .following import SilenceTimeout, result_of
from .generation import JsonOption, PatienceOption, WaitOption
from .output import out, print_json, table_of

NUMBERS_SHOWN = 6  # of a vector: enough to see that vectors differ


def embed_command(
    model: Annotated[str, typer.Argument(help="Model id, or :default.")],
    texts: Annotated[list[str], typer.Argument(help="Texts to embed; - reads one per line from stdin.")],
    dimensions: Annotated[int | None, typer.Option(help="Numbers to keep of each vector.")] = None,
    normalize: Annotated[bool, typer.Option(help="Vectors of unit length.")] = True,
    truncate: Annotated[bool, typer.Option(help="Cut texts that are too long instead of refusing them.")] = False,
    json: JsonOption = False,
    wait: WaitOption = False,
    patience: PatienceOption = 60.0,
) -> None:
    """Turn texts into vectors.

    Example:  cellama embed tiny "a red fox" "a green frog" --json
    """
    texts = _lines(texts)
    with Client() as client:
        job = client.embed(model, texts, wait=wait, dimensions=dimensions, normalize=normalize, truncate=truncate)
        result = result_of(job, SilenceTimeout(job.id, patience, unserved=wait))
    if json:
        print_json(result)
        return
    embeddings: list[Any] = [*result["embeddings"]]
    for text, embedding in zip(texts, embeddings, strict=True):
        per_token = isinstance(embedding[0], list)
        head = ", ".join(f"{value:.4f}" for value in (embedding[0] if per_token else embedding)[:NUMBERS_SHOWN])
        size = f"{len(embedding)} tokens of {len(embedding[0])}" if per_token else str(len(embedding))
        out.print(f"{text!r}: [{head}, …] ({size} dimensions)", markup=False)


def rerank_command(
    model: Annotated[str, typer.Argument(help="Model id, or :default.")],
    query: Annotated[str, typer.Argument(help="What is asked.")],
    documents: Annotated[list[str], typer.Argument(help="Documents to rank; - reads one per line from stdin.")],
    top_n: Annotated[int | None, typer.Option(help="Number of best documents to show (default: all).")] = None,
    truncate: Annotated[bool, typer.Option(help="Cut documents that are too long instead of refusing them.")] = False,
    json: JsonOption = False,
    wait: WaitOption = False,
    patience: PatienceOption = 60.0,
) -> None:
    """Rank documents by how well they answer a query.

    Example:  cellama rerank reranker "what eats frogs?" "a red fox" "a white stork"
    """
    documents = _lines(documents)
    with Client() as client:
        job = client.rerank(model, query, documents, wait=wait, top_n=top_n, truncate=truncate)
        result = result_of(job, SilenceTimeout(job.id, patience, unserved=wait))
    if json:
        print_json(result)
        return
    out.print(_ranking(documents, result["results"]))


def _ranking(documents: list[str], results: list[Ranked]) -> Table:
    table = table_of("score", "index", "document", right="score, index")
    for entry in results:
        table.add_row(f"{entry['score']:.4f}", str(entry["index"]), escape(repr(documents[entry["index"]])))
    return table


def _lines(texts: list[str]) -> list[str]:
    if texts != ["-"]:
        return texts
    try:
        return sys.stdin.buffer.read().decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidJob(f"stdin is not valid UTF-8 at byte {error.start}; convert it first") from None


COMMANDS: dict[str, Callable[..., None]] = {"embed": embed_command, "rerank": rerank_command}
