"""Which of a step's work goes into one decode call each. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from .sequence import SlotWork
from .strategies import MIN_CHUNK


def micro_batches_of(works: Seq[SlotWork], *, unified: bool) -> list[list[SlotWork]]:
    """Return the decode calls of a step, in order; each chunk is in one of them.

    With a stream per slot (not `unified`) single tokens go apart from longer chunks. Together llama.cpp would run the
    first token of every slot in one pass and the rest of the chunks in another, and these rests, a token short, would
    miss its tiles of 64 (docs/adr/002-prefill-chunks.md). The longer ones always go first, because a changing order
    would put two of them between two tokens of a stream. Of these, prompts at whose end a reader waits are decoded one
    by one, by admission, so that the first does not wait for the second.
    """
    if unified:
        return [list(works)] if works else []
    lengths = Counter(len(work.chunk.tokens) for work in works)
    awaited: list[tuple[float, SlotWork]] = []
    others: list[SlotWork] = []
    single: list[SlotWork] = []
    for work in works:
        if len(work.chunk.tokens) == 1:
            single.append(work)
        elif _is_awaited(work) and (len(work.chunk.tokens) >= MIN_CHUNK or lengths[len(work.chunk.tokens)] == 1):
            awaited.append((work.sequence.admitted_at or 0.0, work))
        else:
            others.append(work)
    awaited.sort(key=lambda entry: entry[0])
    parts = [*([work] for _, work in awaited), others, single]
    return [part for part in parts if part]


def _is_awaited(work: SlotWork) -> bool:
    """Return whether an interactive request has its first token after this chunk."""
    return work.sequence.request.is_interactive and work.chunk.samples
