"""The kinds `tokenize`, `detokenize` and `apply_chat_template`, which need the vocabulary of a model but no slot."""

from __future__ import annotations

from pydantic import Field, StrictBool
from typing_extensions import TypedDict

from ..payloads import BaseJob, ConversationJob, Text, TokenList
from . import Kind

TASK_TOKENIZE = "cellama.tokenize"
TASK_DETOKENIZE = "cellama.detokenize"
TASK_APPLY_CHAT_TEMPLATE = "cellama.apply_chat_template"


class TokenizeJob(BaseJob):
    """The token ids of a text."""

    text: Text
    add_special: StrictBool = Field(default=True, description="Add the tokens that begin and end a text.")
    parse_special: StrictBool = Field(
        default=False, description="Tokenize special tokens in the text as special tokens, not as plain text."
    )


class TokenizeResult(TypedDict):
    """Result of `tokenize`."""

    tokens: list[int]
    model: str


class DetokenizeJob(BaseJob):
    """The text of token ids."""

    tokens: TokenList


class DetokenizeResult(TypedDict):
    """Result of `detokenize`."""

    text: str
    model: str


class TemplateJob(ConversationJob):
    """The prompt of a conversation, as text and as token ids."""


class TemplateResult(TypedDict):
    """Result of `apply_chat_template`, with the prompt as text and as token ids."""

    prompt: str
    tokens: list[int]
    model: str


TOKENIZE = Kind(task=TASK_TOKENIZE, payload=TokenizeJob, positional=("model", "text"), result=TokenizeResult)
DETOKENIZE = Kind(task=TASK_DETOKENIZE, payload=DetokenizeJob, positional=("model", "tokens"), result=DetokenizeResult)
APPLY_CHAT_TEMPLATE = Kind(
    task=TASK_APPLY_CHAT_TEMPLATE, payload=TemplateJob, positional=("model", "messages"), result=TemplateResult
)
