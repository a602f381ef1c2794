"""Names of the files of a split model, such as `…-00001-of-00003.gguf` (llama.h: llama_split_path).

All functions in this module are pure.
"""

from __future__ import annotations

import re

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def part_names(name: str) -> list[str]:
    """Return the names of all files of the model in order. If the file is not a part, return only its name."""
    part = _PART.search(name)
    if part is None:
        return [name]
    stem, count = name[: part.start()], int(part[2])
    return [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def is_first_part(name: str) -> bool:
    """Return whether the file represents its model, because it is the first part or the only file."""
    part = _PART.search(name)
    return part is None or int(part[1]) == 1
