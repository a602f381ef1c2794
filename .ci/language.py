"""Find sentences that are hard to read for readers of technical English.

The check covers the prose of Markdown pages, docstrings, comments, error and log messages, help texts of options,
descriptions of settings, and names of tests. Its rules are in docs/CONTRIBUTING.md under "How we write English".

    .venv/bin/python .ci/language.py            # fail on any finding
    .venv/bin/python .ci/language.py FILE ...   # check these files only
    .venv/bin/python .ci/language.py --sample 7 # draw 200 texts with this seed, for a reader to grade
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
EXCEPT = (".ci/language.py",)  # its patterns are the dialect
MAX_WORDS = 35  # in a sentence: style guides of the field ask for 25 to 30
GENERATED = re.compile(r"^<!-- generated: .*?^<!-- end of generated part -->$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4}.*$", re.MULTILINE)  # code in a docstring
FENCED = re.compile(r"^( *)(```|~~~).*?^\1\2$", re.MULTILINE | re.DOTALL)
SENTENCE_END = re.compile(r"(?<=[.!?])[)\"'”*_]*\s+(?=[A-Z`\"'“(*\[])|\n\s*\n")

DIALECT = {
    r"but for (?=an?\b|the\b|those\b|its\b|their\b|what\b|that\b)": "except",
    r"(?:goes|go|going|gone|went) on": "resume, continue",
    r"shall": "should, must",
    r"beside": "alongside, while, next to",
    r"(?<!there )(?:is|are|was|were|be) (?-i:no|none)\b(?! longer| more| matter)": "negate with a verb: is not a …",
    r"some (?=\d)": "about",
    r"told": "reported, documented, logged",
    r"tells?(?! you| apart)": "reports, returns, logs",
    r"h(?:ears?|eard) of": "receives, is notified of",
    r"after so long": "name the duration",
    r"so many(?! as| that)": "name the number",
    r"tr(?:y|ies|ied) again": "retry",
    r"beg(?:un|an|ins?) anew": "start over",
    r"gives? up its": "releases its",
    r"as good as none": "ignored",
    r"in the midst of": "during",
    r"guess(?:es|ed)? tokens?|guesses": "draft tokens",
    r"thoughts?": "reasoning",
    r"of late": "recently",
    r"whoever|whosoever|whatever becomes of": "name who acts",
    r"lets? go of": "releases",
    r"at first sight|as ever": "plain words",
    r"no well-formed": "malformed",
    r"waiting lines?": "waiting queue",
    r"errands?": "command",
    r"choosers?": "token sampler",
    r"is void": "is superseded",
    r", too(?=[.,;:)]|$)": "also",
}
PATTERNS = {
    "dialect": re.compile(
        "|".join(rf"(?P<d{i}>\b{p}\b)" if p[0] != "," else rf"(?P<d{i}>{p})" for i, p in enumerate(DIALECT)), re.I
    ),
    "headless": re.compile(
        r"^(?:Who(?:se)?\s(?!is the\b|are the\b)[^?]*$|What (?!happens\b|is\b|are\b|to\b|you\b)[^?]*$)"
        r"|(?:[.;:]|, and|, but) who(?:ever|se)?\s",
    ),
}
HELP_START = re.compile(r"^(?:Of|For|In|At|Its|Their|Whose|As|of|for|in|at|its|their|whose|as)\b")
FRAGMENT = re.compile(r"^(?:Of|At|Whose|Who|So many|That|Those|Its|Their|What|As|By|In|On|From|With)\b")
TEST_WORDS = re.compile(r"(?:^|_)(?:told|tells?|beside|whoever|is_none|are_none|goes_on|go_on|shall)(?:_|$)")
# Numbers of texts in a sample, by kind.
SAMPLE = {"documentation": 80, "docstring": 40, "help": 30, "error": 20, "log": 10, "test name": 20}
LOGGERS = {"debug", "info", "warning", "error", "exception", "critical"}
HELPS = {"help", "description", "short_help", "epilog"}


class Finding(NamedTuple):
    """A place in a file where the text breaks a rule."""

    file: str
    line: int
    rule: str
    text: str


class Text(NamedTuple):
    """A piece of text from a file. `kind` is prose, module, docstring, comment, error, log or help."""

    line: int
    kind: str
    text: str


def markdown_texts(text: str) -> Iterator[Text]:
    """Yield the paragraphs, list items and table cells of a page, without code and generated parts."""
    blank = lambda part: "\n" * part[0].count("\n")  # noqa: E731
    text = FENCED.sub(blank, GENERATED.sub(blank, text))
    text = re.sub(r"<!--.*?-->", blank, text, flags=re.DOTALL)
    paragraph: list[str] = []
    start = 1
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        item = re.match(r"\s*(?:[-*+]|\d+\.|#+|!!!|\?\?\?|>)\s", line)
        if not line.strip() or item or line.lstrip().startswith("|"):
            if paragraph:
                yield Text(start, "prose", " ".join(paragraph))
            paragraph = []
        if line.lstrip().startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")):
                if re.search(r"[a-z]{2}", cell):
                    yield Text(number, "prose", cell.strip())
        elif line.strip():
            if not paragraph:
                start = number
            paragraph.append(re.sub(r"^\s*(?:[-*+]|\d+\.|#+|>)\s+", "", line).strip())


def python_texts(source: str) -> Iterator[Text]:
    """Yield docstrings, comments, error and log messages, and help texts of options."""
    tree = ast.parse(source)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings.add(id(first.value))
                kind = "module" if isinstance(node, ast.Module) else "docstring"
                yield Text(first.lineno, kind, INDENTED.sub("", inspect.cleandoc(first.value.value)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from _strings(node.exc.args, "error")
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name in LOGGERS and node.args:
                yield from _strings(node.args[:1], "log")
                yield from _strings((each.value for each in node.keywords if each.arg == "detail"), "log")
            for keyword in node.keywords:
                if keyword.arg in HELPS:
                    yield from _strings([keyword.value], "help")
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#(?:!| noqa| type:| ruff:)", token.string):
            text = token.string.lstrip("# ")
            if comments and comments[-1][0] == token.start[0] - 1 and token.line.strip().startswith("#"):
                comments[-1] = (token.start[0], f"{comments[-1][1]} {text}")
            else:
                comments.append((token.start[0], text))
    yield from (Text(line, "comment", text) for line, text in comments)


def _strings(nodes: Iterable[ast.AST], kind: str) -> Iterator[Text]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Text(node.lineno, kind, node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "X" for p in node.values]
            yield Text(node.lineno, kind, "".join(map(str, parts)))


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text. Code in backticks counts as one word."""
    text = re.sub(r"``?[^`]*``?", "CODE", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"; default: ", ", default ", text)
    for sentence in SENTENCE_END.split(text):
        if sentence and (sentence := " ".join(sentence.split())):
            yield sentence


def findings(name: str) -> Iterator[Finding]:
    """Yield the places in a file that break a rule. The path is relative to the root."""
    source = (ROOT / name).read_text(encoding="utf-8")
    is_page = name.endswith(".md")
    for line, kind, text in markdown_texts(source) if is_page else python_texts(source):
        for sentence in sentences(text):
            for found in PATTERNS["dialect"].finditer(sentence):
                instead = list(DIALECT.values())[int(str(found.lastgroup)[1:])]
                yield Finding(name, line, "dialect", f"{found[0]!r} ({instead}): {sentence[:90]}")
            if PATTERNS["headless"].search(sentence):
                yield Finding(name, line, "headless", sentence[:100])
            if kind in ("prose", "docstring", "module") and len(re.findall(r"[;:](?= )", sentence)) > 1:
                yield Finding(name, line, "joined", sentence[:100])
            if len(sentence.split()) > MAX_WORDS:
                yield Finding(name, line, "long", f"{len(sentence.split())} words: {sentence[:80]}")
        if kind == "help" and HELP_START.match(text):
            yield Finding(name, line, "help", text[:100])
        if kind == "docstring" and FRAGMENT.match(text):
            yield Finding(name, line, "fragment", text.splitlines()[0][:100])
    if name.startswith("tests/"):
        for found in re.finditer(r"^\s*(?:async )?def (test_\w+)", source, re.MULTILINE):
            if TEST_WORDS.search(found[1]):
                yield Finding(name, source[: found.start()].count("\n") + 1, "test name", found[1])


def files() -> list[str]:
    """Return the tracked files that contain text, including tests."""
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if name not in EXCEPT and (ROOT / name).exists()]


def sample(seed: int) -> Iterator[str]:
    """Draw 200 texts at random from all files. SAMPLE defines the number of texts of each kind."""
    drawn: dict[str, list[str]] = {kind: [] for kind in SAMPLE}
    for name in files():
        source = (ROOT / name).read_text(encoding="utf-8")
        is_test = name.startswith("tests/")
        if is_test:
            drawn["test name"] += [f"{name}: {test}" for test in re.findall(r"def (test_\w+)", source)]
        elif name.endswith(".md"):
            texts = (sentence for text in markdown_texts(source) for sentence in SENTENCE_END.split(text.text))
            drawn["documentation"] += [f"{name}: {text}" for text in texts if len(text.split()) > 3]
        else:
            for _, kind, text in python_texts(source):
                kind = "docstring" if kind == "module" else kind
                if kind in drawn and len(text.split()) > 2:
                    parts = SENTENCE_END.split(text) if kind == "docstring" else [text]
                    drawn[kind] += [f"{name}: {' '.join(part.split())}" for part in parts if len(part.split()) > 2]
    random = Random(seed)
    for kind, texts in drawn.items():
        for number, text in enumerate(random.sample(texts, SAMPLE[kind]), start=1):
            yield f"{kind} {number}: {text}"


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    if arguments[:1] == ["--sample"]:
        print(*sample(int(arguments[1])), sep="\n")
        return 0
    found = [finding for name in arguments or files() for finding in findings(name)]
    for finding in found:
        print(f"{finding.file}:{finding.line}: {finding.rule}: {finding.text}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
