"""The kind `embed`, which computes one vector per text."""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic import Field, StrictBool
from typing_extensions import TypedDict

from ..payloads import BaseJob, Count, Inputs
from ..shapes.results import Usage
from . import Kind

TASK_EMBED = "cellama.embed"


class EmbedJob(BaseJob):
    """One vector per string or list of token ids. Vectors have unit length unless `normalize` is false."""

    texts: Inputs = Field(description="Texts to embed. Each text is a string or a list of token ids.")
    normalize: StrictBool = Field(default=True, description="Scale vectors to unit length.")
    dimensions: Count | None = Field(
        default=None, ge=1, description="Number of dimensions to keep per vector (default: all)."
    )
    truncate: StrictBool = Field(
        default=False, description="Truncate texts that are too long instead of rejecting them."
    )
    encoding: Literal["list", "base64"] = Field(
        default="list", description="Format of the vectors. `base64` encodes little-endian float32 values."
    )


class EmbedResult(TypedDict):
    """Result of `embed`, with one entry per text.

    A base64 entry contains little-endian float32 values. If the model returns one vector per token, an entry is a list
    of vectors, or the base64 encoding of all vectors, with their shape in `shapes`.
    """

    embeddings: list[list[float]] | list[str] | list[list[list[float]]]
    usage: Usage
    model: str
    shapes: NotRequired[list[list[int]]]


EMBED = Kind(
    task=TASK_EMBED, payload=EmbedJob, positional=("model", "texts"), result=EmbedResult, operation="embeddings"
)
