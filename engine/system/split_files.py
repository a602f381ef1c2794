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
    """Return whether the model should be loaded from this file.

    A split model is loaded from its first part, and an unsplit model from its only file.
    """
    part = _PART.search(name)
    return part is None or int(part[1]) == 1
