"""What of a step's batch goes into one decode call each. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cellama.engine.backend import Chunk

from .sequence import Sequence
from .strategies import INTERACTIVE_PRIORITY, MIN_CHUNK


def passes_of(chunks: Seq[Chunk], slots: Seq[Sequence | None], *, unified: bool) -> list[list[Chunk]]:
    """The decode calls of a step, in order; each chunk is in one of them. `slots` has the sequence of each slot.

    With a stream per slot (not `unified`) single tokens go apart from longer chunks. Together llama.cpp would run the
    first token of every slot in one pass and the rest of the chunks in another, and these rests, a token short, would
    miss its tiles of 64 (docs/adr/002-prefill-chunks.md). The longer ones always go first: now the one, now the other
    first would put two of them between two tokens of a stream. Of these, prompts at whose end somebody waits go one by
    one, by admission: the first need not wait for the second.
    """
    if unified:
        return [list(chunks)]
    awaited: list[tuple[float, Chunk]] = []
    others: list[Chunk] = []
    single: list[Chunk] = []
    for chunk in chunks:
        sequence = slots[chunk.slot]
        if len(chunk.tokens) == 1:
            single.append(chunk)
        elif sequence is not None and _is_awaited(chunk, sequence):
            awaited.append((sequence.admitted_at or 0.0, chunk))
        else:
            others.append(chunk)
    awaited.sort(key=lambda entry: entry[0])
    parts = [*([chunk] for _, chunk in awaited), others, single]
    return [part for part in parts if part]


def _is_awaited(chunk: Chunk, sequence: Sequence) -> bool:
    """True if an interactive request has its first token after this chunk, and a pass of its own costs little."""
    is_interactive = sequence.request.priority <= INTERACTIVE_PRIORITY
    return is_interactive and chunk.samples and len(chunk.tokens) >= MIN_CHUNK
