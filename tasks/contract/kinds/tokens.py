"""The kinds `tokenize`, `detokenize` and `apply_chat_template`, which need a model's vocabulary but no slot."""

from __future__ import annotations

from typing import Annotated, NotRequired

from pydantic import Field, StrictBool
from typing_extensions import TypedDict

from ..payloads import BaseJob, RepliedJob, Text, TokenList
from . import Kind

TASK_TOKENIZE = "cellama.tokenize"
TASK_DETOKENIZE = "cellama.detokenize"
TASK_APPLY_CHAT_TEMPLATE = "cellama.apply_chat_template"


ReturnPieces = Annotated[StrictBool, Field(description="Add the text of each token to the result.")]
Piece = str | list[int]  # the text of a token, or its bytes if they are only part of a character


class TokenizeJob(BaseJob):
    """The token ids of a text."""

    text: Text = Field(description="Text to tokenize.")
    add_special: StrictBool = Field(
        default=True, description="Add the model's special tokens at the start and end of the text."
    )
    parse_special: StrictBool = Field(
        default=False, description="Parse special tokens in the text instead of treating them as plain text."
    )
    return_pieces: ReturnPieces = False


class TokenizeResult(TypedDict):
    """Result of `tokenize`."""

    tokens: list[int]
    pieces: NotRequired[list[Piece]]
    model: str


class DetokenizeJob(BaseJob):
    """Text decoded from a list of token ids."""

    tokens: TokenList = Field(description="Token ids to convert to text.")


class DetokenizeResult(TypedDict):
    """Result of `detokenize`."""

    text: str
    model: str


class TemplateJob(RepliedJob):
    """The prompt of a conversation, as text and as token ids."""

    return_pieces: ReturnPieces = False


class TemplateResult(TypedDict):
    """Result of `apply_chat_template`, with the prompt as text and as token ids."""

    prompt: str
    tokens: list[int]
    pieces: NotRequired[list[Piece]]
    model: str


TOKENIZE = Kind(task=TASK_TOKENIZE, payload=TokenizeJob, positional=("model", "text"), result=TokenizeResult)
DETOKENIZE = Kind(task=TASK_DETOKENIZE, payload=DetokenizeJob, positional=("model", "tokens"), result=DetokenizeResult)
APPLY_CHAT_TEMPLATE = Kind(
    task=TASK_APPLY_CHAT_TEMPLATE, payload=TemplateJob, positional=("model", "messages"), result=TemplateResult
)
