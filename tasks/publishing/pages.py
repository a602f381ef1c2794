"""Events of many runs, cut into calls of Redis."""

from __future__ import annotations

from collections.abc import Iterator

from cellama.tasks.state.records import Entry

MAX_BATCH = 1000  # events per call of Redis: it serves no other client meanwhile
MAX_BATCH_BYTES = 8 << 20  # the same, but for one larger event
Numbered = tuple[str, Entry]  # with the run id


def pages(entries: list[Numbered]) -> Iterator[list[Numbered]]:
    """The entries in their order, in pages that Redis takes in one call."""
    page: list[Numbered] = []
    num_bytes = 0
    for each in entries:
        if page and (len(page) == MAX_BATCH or num_bytes + each[1].num_bytes > MAX_BATCH_BYTES):
            yield page
            page, num_bytes = [], 0
        page.append(each)
        num_bytes += each[1].num_bytes
    if page:
        yield page
