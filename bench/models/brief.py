"""Make the bundled model close open brackets and quotes, so that constrained answers are short.

Without this bias, the model fills constrained answers with endless lists and strings that repeat themselves.
"""

from __future__ import annotations

from typing import Any

from gguf import GGUFReader

from cellama.engine.bundled import TINY_PATH

_BIAS = {
    **dict.fromkeys(('"', '"}', '"]', '"}}', '."', '?"'), 8.0),
    **dict.fromkeys(("]", "}", "}}"), 4.0),
    **dict.fromkeys(("{", '{"', ' {"'), -8.0),  # recursive schemas let it open objects for ever
    "@": 8.0,
}
_FREQUENCY_PENALTY = 1.5  # a list of one number, or a text of one word, ends after a few


def brief_sampling() -> dict[str, Any]:
    """Return greedy `sampling` settings that avoid repetitions and favour closing tokens."""
    tokens = GGUFReader(str(TINY_PATH)).fields["tokenizer.ggml.tokens"]
    texts = [bytes(tokens.parts[index]).decode().replace("Ġ", " ") for index in tokens.data]
    bias = {str(token): _BIAS[text] for token, text in enumerate(texts) if text in _BIAS}
    return {"temperature": 0, "frequency_penalty": _FREQUENCY_PENALTY, "logit_bias": bias}
