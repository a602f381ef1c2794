"""How the files of a split model are named: `…-00001-of-00003.gguf` and so on (llama.h: llama_split_path). Pure."""

from __future__ import annotations

import re

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def part_names(name: str) -> list[str]:
    """The files of the model that this file is a part of, the first one first; else it alone."""
    part = _PART.search(name)
    if part is None:
        return [name]
    stem, count = name[: part.start()], int(part[2])
    return [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def is_first_part(name: str) -> bool:
    """True if the file stands for its model: the first part, or all of it."""
    part = _PART.search(name)
    return part is None or int(part[1]) == 1
