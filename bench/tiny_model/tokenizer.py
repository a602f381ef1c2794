"""Train the bundled model's byte-level BPE tokenizer with the `tokenizers` library."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import END_OF_TEXT, END_THINK, END_TOOL_CALL, IM_END, IM_START, THINK, TOOL_CALL, Document, documents

CONTROL_TOKENS = (END_OF_TEXT, IM_START, IM_END)  # never part of the text
TAG_TOKENS = (THINK, END_THINK, TOOL_CALL, END_TOOL_CALL)  # one token each, and part of the text
N_VOCAB = 1024


def _texts(seed: int, count: int) -> Iterator[str]:
    for document in itertools.islice(documents(seed), count):
        for segment in document:
            text = segment.text
            for token in (*CONTROL_TOKENS, *TAG_TOKENS):
                text = text.replace(token, "\n")
            yield text


def train_tokenizer(seed: int = 1, count: int = 8000) -> Tokenizer:
    """Return a tokenizer whose ids are the control and tag tokens, then the 256 bytes, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    special: list[str | AddedToken] = [AddedToken(t, special=True) for t in CONTROL_TOKENS]
    special += [AddedToken(t, special=False, normalized=False) for t in TAG_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=N_VOCAB,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, count), trainer)
    return tokenizer


def encode_document(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[bool]]:
    """Return the token ids of a document, and whether each token is a target.

    Consecutive segments of the same kind are encoded as one text, like a user's prompt.
    """
    ids: list[int] = []
    targets: list[bool] = []
    for target, run in itertools.groupby(document, key=lambda segment: segment.target):
        encoded = tokenizer.encode("".join(segment.text for segment in run)).ids
        ids += encoded
        targets += [target] * len(encoded)
    return ids, targets
