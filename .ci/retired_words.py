"""Fails on words that were retired (docs/glossary.md): identifiers of the engine's core, and texts of the repository.

Texts are all that people read: pages, comments, docstrings, messages, log lines. Those of tests are not looked at: they
quote what a user may say.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINE = ROOT / "engine"
ROOMS = ("core", "kvcache", "sampling", "scheduling")  # elsewhere a line is one of a file, and memory has room

# A pattern for whole identifiers → what is meant, in the field's words.
RETIRED = {
    r"(waiting_)?line|WaitingLine": "a waiting queue",
    r"put_back|rejoin": "requeue, or add: a queue's verbs",
    r"_?room_for|make_room": "find_slot, free_cells: it is slots and cells that are looked for",
    r"_?place|place_for": "assign_slot, find_slot; or index, rank",
    r"Share|shares": "TokenAllocation, allocations: cells are shared, tokens are allocated",
    r"computed|undo": "commit, rollback, as of any transaction",
    r"_?(is_)?wanted": "demanded: a prefix that a waiting sequence begins with",
    r"soon|liked|_bring": "prefixes_in_progress, preferred, _load_prefix",
    r"errand|Errand|_?hand_over|tell": "a command, an inbox, flush",
    r"[cC]hooser|choose|num_chosen": "TokenSampler, sample, num_sampled: tokens are sampled",
    r"passes|passes_of": "micro-batches",
}
# Files in which such a word is the right one: the results of decode calls.
EXCEPT = {"computed": {"core/forward.py", "core/engine_core.py"}}
# In texts: a pattern → what is meant.
RETIRED_TEXTS = {
    r"waiting lines?\b": "the waiting queue",
    r"\berrands?\b": "a command",
    r"\bchoosers?\b": "a token sampler",
    r"\bis void\b": "is superseded",
}
TEXTS = (
    "*.py",
    "*.lua",
    "*.md",
    "*.toml",
    "*.yml",
    "*.css",
    "*.sh",
    "*.service",
    "Makefile",
    "Dockerfile",
    "run",
    "check",
)
FOLDERS = (".ci", "api", "bench", "config", "docs", "engine", "tasks")
TEXTS_EXCEPT = {
    ".ci/retired_words.py": "names them",
    "bench/tiny_model/corpus.py": "what the bundled model has learned",
}
PATTERNS = {re.compile(pattern): instead for pattern, instead in RETIRED.items()}


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that a file gives to something, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def retired(path: Path) -> Iterator[str]:
    """A line of text for each retired word that a file gives as a name."""
    name = path.relative_to(ENGINE).as_posix()
    for line, word in identifiers(ast.parse(path.read_text())):
        for pattern, instead in PATTERNS.items():
            if pattern.fullmatch(word) and name not in EXCEPT.get(word, ()):
                yield f"engine/{name}:{line}: {word!r} is retired: {instead}"


def retired_texts() -> Iterator[str]:
    """A line of text for each line of the repository with a retired word."""
    files = {file for folder in FOLDERS for pattern in TEXTS for file in (ROOT / folder).rglob(pattern)}
    files |= {file for pattern in TEXTS for file in ROOT.glob(pattern)}
    for file in sorted(files):
        name = file.relative_to(ROOT).as_posix()
        if name in TEXTS_EXCEPT or not file.is_file():
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            for pattern, instead in RETIRED_TEXTS.items():
                for found in re.finditer(pattern, line, re.IGNORECASE):
                    yield f"{name}:{number}: {found[0]!r} is retired: {instead}"


if __name__ == "__main__":
    found = [text for room in ROOMS for path in sorted((ENGINE / room).rglob("*.py")) for text in retired(path)]
    found += retired_texts()
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(1 if found else 0)
