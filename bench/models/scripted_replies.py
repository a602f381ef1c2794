"""Make a model write given replies, so that it can be tested with agents whose tasks are too difficult for it.

The option `logits_processors` of the model names `ScriptedReplies` by its import path, and the environment variable
SCRIPTED_REPLIES names a JSON file with a list of `ScriptedReply` objects, one per turn. Prompts are computed, cached
and reused as usual. Only the choice of the next token is replaced.
"""

from __future__ import annotations

import functools
import json
import os
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cellama.engine import LogitsProcessor, SequenceStart, Tokenizer
from cellama.engine.sampling.processors import Logits

PROCESSOR = f"{__name__}:scripted_replies"
REPLIES_FILE = "SCRIPTED_REPLIES"  # environment variable of the worker
WITHOUT_TOOLS = "A small task"  # reply to side requests, with which agents ask for a title, for instance
# Texts of the bundled model's chat template.
_TOOLS, _RESULT, _REASONING, _CLOSED, _END = "<tools>", "<tool_response>", "<think>\n", "\n</think>\n\n", "<|im_end|>"


@dataclass(frozen=True)
class ScriptedReply:
    """The reply of one turn.

    `text` includes tool calls in the template's format. `reasoning` is used if reasoning is enabled.
    """

    reasoning: str
    text: str


class ForcedTokens:
    """Forbids all tokens except the next token of a reply."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._left = deque(tokens)

    def apply(self, logits: Logits) -> None:
        if self._left:
            logits[:] = -np.inf
            logits[self._left[0]] = 0.0

    def accept(self, token: int) -> None:
        if self._left:
            self._left.popleft()


def scripted_replies(start: SequenceStart) -> LogitsProcessor | None:
    """Return the processor that forces this turn's reply. The turn is the number of tool results in the prompt.

    A side request without tools gets a short reply, or an unforced reply if it has a constraint. The model repeats the
    script's last reply in all later turns.
    """
    num_prompt = len(start.tokens) - start.num_sampled
    prompt = _bytes(start.tokens[:num_prompt])
    replies = [ScriptedReply(**reply) for reply in json.loads(Path(os.environ[REPLIES_FILE]).read_text())]
    if _marker(_TOOLS) in prompt:
        reply = replies[min(prompt.count(_marker(_RESULT)), len(replies) - 1)]
    elif start.params.json_schema or start.params.regex or start.params.grammar:
        return None
    else:
        reply = ScriptedReply("", WITHOUT_TOOLS)
    reasoning = reply.reasoning + _CLOSED if prompt.endswith(_marker(_REASONING)) else ""
    return ForcedTokens(_ids(reasoning + reply.text + _END)[start.num_sampled :])


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer("bundled://tiny")


def _ids(text: str) -> list[int]:
    return _tokenizer().tokenize(text, add_special=False, parse_special=True)


def _bytes(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


@functools.cache
def _marker(text: str) -> bytes:
    return _bytes(_ids(text))
