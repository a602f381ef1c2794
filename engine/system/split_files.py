"""File names of split models, such as `…-00001-of-00003.gguf` (llama.h: llama_split_path).

All functions in this module are pure.
"""

from __future__ import annotations

import re

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def part_names(name: str) -> list[str]:
    """Return the names of all of the model's files, in order. If the model is not split, return only the given name."""
    part = _PART.search(name)
    if part is None:
        return [name]
    stem, count = name[: part.start()], int(part[2])
    return [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def is_first_part(name: str) -> bool:
    """Return whether the file represents its model.

    This is the case for the first part of a split model, and for the only file of an unsplit model.
    """
    part = _PART.search(name)
    return part is None or int(part[1]) == 1
