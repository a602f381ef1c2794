"""What the engine needs of an inference library. `llama/` and `fake.py` implement it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cellama.engine.core.adapters import AdapterSet, AdapterStore
from cellama.engine.kvcache.manager import KvMemory
from cellama.engine.scheduling.scheduler import Chunk

from .logprobs import TokenLogprob
from .options import SamplingParams


class DecodeError(Exception):
    """A decode call failed with llama.cpp's return code (llama.h: llama_decode).

    1: no room in the KV cache; 2: aborted; -1: invalid batch; below -1: fatal, part of the batch may be computed.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"llama_decode returned {code}")
        self.code = code


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded model is."""

    architecture: str
    description: str  # llama.cpp's own words, for instance "llama 1B Q8_0"
    n_params: int
    size_bytes: int
    n_ctx_train: int
    n_vocab: int
    n_embd: int
    file_type: str = ""  # quantisation, for instance "Q8_0"
    fingerprint: str = ""  # of the file's content (llama/gguf_file.py says how); empty for a vocabulary alone


class Vocabulary(Protocol):
    """Text to tokens and back. Any thread may use it at any time."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; none for a control token."""
        ...

    def is_end(self, token: int) -> bool:
        """True for tokens that end a generation."""
        ...


class Sampler(Protocol):
    """Chooses tokens for one sequence. Engine thread only."""

    @property
    def mirostat_mu(self) -> float | None:
        """What mirostat has learned, for `new_sampler`; None without it."""
        ...

    def sample(self, slot: int, forced: int | None = None) -> tuple[int, TokenLogprob | None]:
        """The next token, from the logits that the last decode left for this slot. Raises GrammarFailed.

        It is `forced`, if that is given and no grammar forbids it.
        """
        ...

    def bind(self) -> None:
        """The grammar, if there is one, holds for the tokens from now on."""
        ...

    def close(self) -> None: ...


class Backend(KvMemory, AdapterStore, Protocol):
    """A context with the cells of all slots.

    Engine thread only, except `vocabulary`, `prepare`, `abort` and what loads and frees adapters.
    """

    n_vocab: int
    threads: int  # that a decode call computes with

    def set_threads(self, count: int) -> None:
        """The next decode call computes with so many threads."""
        ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    def prepare(self, params: SamplingParams, visible: Mapping[int, bytes] | None = None) -> Any:
        """What `new_sampler` makes the samplers of a request from. All that takes long is done here.

        `visible` are control tokens whose text belongs to the output: only these does a grammar see. Raises
        InvalidRequest for a wrong grammar, an unknown token.
        """
        ...

    def decode(self, chunks: Sequence[Chunk], adapters: AdapterSet = ()) -> None:
        """Fills the KV cells of the chunks, which are in order of slots, with these adapters.

        Returns when that is computed, on a GPU, too. Raises DecodeError.
        """
        ...

    def abort(self) -> None:
        """Ends the decode call that runs now, or the next one, with code 2."""
        ...

    def new_sampler(
        self,
        plan: Any,
        seed: int,
        history: Sequence[int],
        *,
        ban_end: bool,
        num_chosen: int = 0,
        num_unbound: int | None = 0,
        mirostat_mu: float | None = None,
    ) -> Sampler:
        """A sampler for what follows `history`, of whose tokens the last `num_chosen` were sampled before.

        `plan` is what `prepare` gave. The grammar does not hold for the first `num_unbound` of these; None: it holds
        once `bind` was called.
        With `ban_end` it never ends a generation. `mirostat_mu` is that of the sampler which it goes on for.
        Raises GrammarFailed.
        """
        ...

    def close(self) -> None: ...


class EmbeddingBackend(Protocol):
    """A context that turns whole sequences into vectors. Embedder thread only."""

    max_tokens: int  # of one text
    batch_tokens: int  # of several texts in one call that pay; at most `max_tokens`
    max_texts: int
    n_embd: int  # numbers in a vector
    per_token: bool  # a vector per token, not per text
    threads: int  # that `embed` computes with

    def set_threads(self, count: int) -> None:
        """The next call of `embed` computes with so many threads."""
        ...

    def embed(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """One array per text, as the model gives it: [n_embd], or [tokens, n_embd] if `per_token`.

        Together at most `max_tokens` tokens. Raises DecodeError.
        """
        ...

    def close(self) -> None: ...
