"""Provide enough stack for vocabularies with which llama.cpp splits texts using the recursive `std::regex`.

The recursion depth grows with the length of a word. Each character of an unbroken run takes 321 bytes of stack,
regardless of the regular expression (measured with llama-cpp-python 0.3.36 on x86-64). Common vocabularies don't
recurse. llama.cpp has special code for these vocabularies (unicode.cpp: unicode_regex_split_custom), or their regular
expressions match only a few characters at a time. All other vocabularies are treated as recursive.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from cellama.engine.errors import InvalidRequest
from cellama.engine.system.threads import start_deep

T = TypeVar("T")

SHALLOW_CHARS = 4_000  # a text up to this length fits the stack of any thread
MAX_RUN = 100_000  # characters; half of what fits the stack of a deep thread
MAX_SUPERBPE_DIGITS = 3_000  # digits for which SuperBPE's expression takes 1.5 s; the time grows quadratically

# Names in tokenizer.ggml.pre whose expressions (llama-vocab.cpp) do not recurse.
ITERATIVE = frozenset(
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe chatglm-bpe glm4 "
    "glm5 mpt starcoder refact command-r smollm codeshell exaone exaone4 minerva-7b mellum mellum2 gpt-2 phi-2 jina-es "
    "jina-de gigachat jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe a.x-4.0 modern-bert olmo jais trillion "
    "granite-docling stablelm2 qwen2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan solar-open qwen35 kimi-k2 gemma4 "
    "granite-embed-multi-311m sarvam-moe laguna grok-2 chameleon".split()
)
_OTHER = r"[^\x00-\x7f\s]"  # characters beyond ASCII, which may belong to any class of llama.cpp
_LETTERS = re.compile(rf"(?:[A-Za-z]|{_OTHER})+")
_DIGITS = re.compile(rf"(?:[0-9]|{_OTHER})+")
_SIGNS = re.compile(rf"(?:[\x00-\x08\x0e-\x1f!-/:-@\[-`{{-\x7f]|{_OTHER})+")
_NO_SPACE = re.compile(rf"(?:[\x00-\x08\x0e-\x1f!-\x7f]|{_OTHER})+")
_WORDS = re.compile(rf"(?:[A-Za-z\s]|{_OTHER})+")
_SPACE = re.compile(r"[\s/]+")  # follows a run in the same match; some expressions include `/`
_ASCII_DIGITS = re.compile(r"[0-9]+")
_RUNS = {
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat", "viking", "whitespace"), (_NO_SPACE,)),
    "exaone-moe": (_WORDS, _DIGITS, _SIGNS),
}


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The method that a vocabulary uses to split texts into words.

    `name` is `tokenizer.ggml.pre` for a BPE vocabulary ("" if it is missing), and None for other types of vocabularies.
    """

    name: str | None

    @property
    def recurses(self) -> bool:
        return self.name is not None and self.name not in ITERATIVE

    def run(self, text: str, work: Callable[[], T]) -> T:
        """Return the result of `work`, which tokenizes the text. Raises InvalidRequest.

        If splitting is recursive and the text is long, `work` is called in a thread with enough stack.
        """
        if not self.recurses or (len(text) <= SHALLOW_CHARS and self.name != "superbpe"):
            return work()
        self._check(text)
        return _in_deep_thread(work)

    def _check(self, text: str) -> None:
        if self.name == "superbpe":
            self._refuse_above(MAX_SUPERBPE_DIGITS, _longest(_ASCII_DIGITS, text), "digits")
        if len(text) > MAX_RUN:
            runs = _RUNS.get(self.name or "", (_LETTERS, _DIGITS, _SIGNS))
            longest = max(_longest(pattern, text) for pattern in runs) + _longest(_SPACE, text)
            self._refuse_above(MAX_RUN, longest, "characters")

    def _refuse_above(self, limit: int, longest: int, unit: str) -> None:
        if longest > limit:
            raise InvalidRequest(
                f"the text has an unbroken run of about {longest} {unit}, and the tokenizer of this model "
                f"({self.name or 'default'}) supports at most {limit}; insert spaces or line breaks"
            )


def _longest(pattern: re.Pattern[str], text: str) -> int:
    """Return the length of the longest match in the text, or 0."""
    return max((match.end() - match.start() for match in pattern.finditer(text)), default=0)


def _in_deep_thread(work: Callable[[], T]) -> T:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    start_deep(run, "cellama-tokenize")
    return future.result()
