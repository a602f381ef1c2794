"""Generate bulk workloads for comparisons, as seeded lines in the short format of `cellama batch run`.

Prompts are token ids, because the number of tokens in a text would depend on the vocabulary. All peers accept token
ids.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .engines import random_prompts


@dataclass(frozen=True, slots=True)
class Line:
    """A prompt and the number of tokens to generate greedily. End tokens are ignored."""

    custom_id: str
    prompt: tuple[int, ...]
    num_new: int


def independent(count: int, length: int, num_new: int, *, seed: int = 0) -> list[Line]:
    """Return lines whose prompts share no prefix."""
    return _lines(random_prompts(count, length, seed=seed), num_new)


def families(count: int, length: int, num_new: int, *, shared: int, num_families: int, seed: int = 0) -> list[Line]:
    """Return shuffled lines.

    Lines of a family share their first `shared` tokens, and families are about equally large.
    """
    prompts: list[list[int]] = []
    for family in range(num_families):
        size = (count - family + num_families - 1) // num_families
        prompts += random_prompts(size, length, shared=shared, seed=seed * num_families + family)
    random.Random(seed).shuffle(prompts)
    return _lines(prompts, num_new)


def _lines(prompts: Iterable[Sequence[int]], num_new: int) -> list[Line]:
    return [Line(f"line-{number}", tuple(prompt), num_new) for number, prompt in enumerate(prompts)]


def write_lines(path: Path, lines: Iterable[Line]) -> None:
    """Write lines as JSONL."""
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            body = {"max_tokens": line.num_new, "temperature": 0, "ignore_eos": True}
            file.write(json.dumps({"custom_id": line.custom_id, "prompt": line.prompt, **body}) + "\n")


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a file that `write_lines` wrote, one at a time."""
    with path.open(encoding="utf-8") as file:
        for text in file:
            found = json.loads(text)
            yield Line(found["custom_id"], tuple(found["prompt"]), found["max_tokens"])


def trie_optimum(prompts: Iterable[Sequence[int]]) -> int:
    """Return the minimum number of prompt tokens to compute, if each distinct prefix is computed once."""
    num_tokens = 0
    last: Sequence[int] = ()
    for prompt in sorted(map(tuple, prompts)):
        num_tokens += len(prompt) - num_common(last, prompt)
        last = prompt
    return num_tokens


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    differing = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))
