"""The interface between the engine and an inference library. `llama/` and `fake.py` implement this interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from .request import SamplingParams, TokenLogprob

NO_FREE_CELLS, ABORTED = 1, 2  # return codes of llama_decode (llama.h) after which a retry is allowed


class DecodeError(Exception):
    """Raised after a failed decode call, with llama.cpp's return code (llama.h: llama_decode).

    The code is 1 if no KV cells are free, 2 if the call was aborted, and -1 if the batch is invalid. Codes below -1 are
    fatal, and part of the batch may already have been computed.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"llama_decode returned {code}")
        self.code = code


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A description of a loaded model."""

    architecture: str
    description: str  # in llama.cpp's words, for example "llama 1B Q8_0"
    n_params: int
    size_bytes: int
    n_ctx_train: int
    n_vocab: int
    n_embd: int
    file_type: str = ""  # quantisation, for example "Q8_0"
    fingerprint: str = ""  # id of the file's content (llama/gguf_files.py); empty if only the vocabulary is loaded


@dataclass(frozen=True, eq=False, slots=True)
class Adapter:
    """A loaded adapter.

    `fingerprint` is the SHA-256 hash of the adapter's file, and `handle` identifies the adapter in the backend.
    """

    name: str
    fingerprint: str
    handle: Any


class AdapterUse(NamedTuple):
    """An adapter, and the scale at which decode calls apply the adapter. The scale is never 0."""

    adapter: Adapter
    scale: float


AdapterSet = tuple[AdapterUse, ...]  # ordered by fingerprint; () = the model without adapters
AdapterKey = tuple[tuple[str, float], ...]


def key_of(adapters: AdapterSet) -> AdapterKey:
    """Return the part of an adapter set that affects KV cells: the contents and scales, but not the names."""
    return tuple((use.adapter.fingerprint, use.scale) for use in adapters)


class Chunk(NamedTuple):
    """Consecutive tokens of one slot in a step's batch."""

    slot: int
    position: int  # position of the first token
    tokens: list[int]
    samples: bool  # whether a token is sampled after the last token, or after the first one and each draft token
    decode: bool = False  # whether it is the last generated token with drafts, instead of a part of the prompt
    num_drafts: int = 0  # draft tokens after the first one; a token is also sampled after each of them

    @property
    def drafts(self) -> list[int]:
        """The draft tokens. Any tokens after the draft tokens are padding, which makes all chunks equally long."""
        return self.tokens[1 : 1 + self.num_drafts]


class Vocabulary(Protocol):
    """Converts text to tokens and tokens to text. Implementations are thread-safe."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token represents. Control tokens represent no bytes."""
        ...

    def is_end(self, token: int) -> bool:
        """Return whether a token ends generation."""
        ...


class Sampler(Protocol):
    """Samples a sequence's tokens. Only the engine thread may use a sampler."""

    @property
    def mirostat_mu(self) -> float | None:
        """The mirostat state to pass to `new_sampler`, or None if the request doesn't use mirostat."""
        ...

    def sample(self, slot: int, forced: int | None = None, row: int = 0) -> tuple[int, TokenLogprob | None]:
        """Return the next token, sampled from the slot's logits of the last decode call. Raises GrammarFailed.

        `row` is the number of draft tokens that were accepted before this token. If `forced` is given, the forced token
        is returned unless a grammar forbids it.
        """
        ...

    def bind(self) -> None:
        """Apply the request's grammar, if there is one, to all following tokens."""
        ...

    def forced_tokens(self) -> list[int]:
        """Return tokens for the text that the grammar requires next, or an empty list if several texts are possible.

        The same text may also have other tokenizations.
        """
        ...


class SamplingPlan(Protocol):
    """A request's prepared sampling parameters, from which samplers are created."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Descriptions of the requested features that the backend doesn't enforce."""
        ...


class KvMemory(Protocol):
    """Accesses the KV cells on the device. The positions of a slot are contiguous and start at 0."""

    n_slots: int
    ctx_per_slot: int
    n_cells: int  # cells of all slots
    unified: bool  # whether all slots use one pool and can share cells; otherwise each slot has its own cells
    partial_reuse: bool  # whether a slot can be truncated at any time

    def first_cut(self, slot: int) -> int:
        """Return the smallest length to which a slot can be truncated.

        The slot can also be truncated to any greater length. The result is 0 if the slot can be truncated to any
        length, and never exceeds the current length. A slot can always be emptied.
        """
        ...

    def first_saved_cut(self, num_tokens: int) -> int:
        """Return the smallest length to which a saved state with `num_tokens` positions can be truncated."""
        ...

    def trim(self, slot: int, num_tokens: int, checkpoint: Any = None) -> bool:
        """Keep the first `num_tokens` positions of a slot.

        If the slot can't be truncated to this length, empty it and return False.
        """
        ...

    def copy(self, source: int, target: int, num_tokens: int, checkpoint: Any = None) -> bool:
        """Copy the first `num_tokens` positions of `source` to the empty slot `target`.

        Return False if nothing was copied.
        """
        ...

    def state_bytes(self, slot: int) -> int:
        """Return the size in bytes of the state that `save` would return."""
        ...

    def save(self, slot: int) -> Any:
        """Return all cells of a slot as an object with an `nbytes` attribute."""
        ...

    def restore(self, slot: int, data: Any, num_tokens: int, checkpoint: Any = None) -> bool:
        """Restore the first `num_tokens` positions of a saved state to an empty slot.

        Return False if nothing was restored.
        """
        ...

    def portable(self, data: Any, num_tokens: int, *, checkpoint: bool = False) -> Buffer:
        """Return a saved state or a checkpoint in a format that doesn't depend on the number of slots.

        Any thread may call this method. Raises ValueError if the state can't be converted to this format.
        """
        ...

    def from_portable(self, data: Buffer, *, checkpoint: bool = False) -> tuple[Any, int]:
        """Convert data returned by `portable` back to a state or checkpoint.

        Return the state or checkpoint, and its token count. Any thread may call this method. Writable buffers are
        not copied. Instead, the state takes ownership of the buffers and modifies them. Raises ValueError if the data
        is damaged.
        """
        ...

    def checkpoint_bytes(self, slot: int) -> int:
        """Return the size in bytes of the checkpoint that `checkpoint` would return."""
        ...

    def checkpoint(self, slot: int) -> Any:
        """Return a checkpoint of the slot at its current length.

        `trim`, `copy` and `restore` can later use this checkpoint to truncate a state to the same length.
        """
        ...


class AdapterStore(Protocol):
    """Manages adapter weights. Implementations are thread-safe."""

    def load_adapter(self, path: Path) -> Any:
        """Load an adapter and return its handle in the backend. Raises AdapterLoadFailed."""
        ...

    def free_adapter(self, handle: Any) -> None:
        """Free an adapter's memory. Later decode calls must not use the adapter."""
        ...


class Backend(KvMemory, AdapterStore, Protocol):
    """An inference context, which holds the KV cells of all slots.

    Only the engine thread may use a backend, except for `vocabulary`, `prepare`, `abort`, and the methods that load and
    free adapters.
    """

    n_vocab: int
    identity: bytes  # digest of what cells depend on, except tokens and adapters: weights, types, formats (ADR 014)
    threads: int  # number of threads that compute a decode call

    def set_threads(self, count: int) -> None:
        """Set the number of threads for later decode calls."""
        ...

    def rest(self) -> None:
        """Stop idle compute threads before a period in which the context is not used."""
        ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    def prepare(self, params: SamplingParams, visible: Mapping[int, bytes] | None = None) -> SamplingPlan:
        """Prepare the sampling parameters of a request for `new_sampler`. This method does all of the slow work.

        `visible` contains the control tokens whose text is part of the output. A grammar can't match any other control
        tokens. Raises InvalidRequest if the grammar is invalid or a token is unknown.
        """
        ...

    def decode(self, chunks: Sequence[Chunk], adapters: AdapterSet = ()) -> None:
        """Compute the KV cells of the chunks, with these adapters applied. The chunks must be sorted by slot number.

        The call returns after the computation has finished, even on a GPU. Raises DecodeError.
        """
        ...

    def abort(self) -> None:
        """Abort the current or next decode call, which then fails with code 2."""
        ...

    def new_sampler(
        self,
        plan: Any,
        seed: int,
        history: Sequence[int],
        *,
        ban_end: bool,
        num_sampled: int = 0,
        num_unbound: int | None = 0,
        mirostat_mu: float | None = None,
    ) -> Sampler:
        """Return a sampler for the tokens that follow `history`. Raises GrammarFailed.

        `plan` must be a result of `prepare`. The last `num_sampled` tokens of `history` were sampled earlier, and the
        grammar doesn't apply to the first `num_unbound` of these tokens. If `num_unbound` is None, the grammar applies
        only after `bind` has been called. With `ban_end`, end tokens are never sampled. `mirostat_mu` is the mirostat
        state from which the sampler continues.
        """
        ...

    def presample(self, samplers: Sequence[tuple[Any, int]]) -> None:
        """Draw the next tokens of these samplers from their slots' first rows of logits, where this saves time.

        `samplers` contains pairs of a sampler and its slot. The next `sample` call of each sampler returns the same
        token as without this call.
        """
        ...

    def close(self) -> None: ...


class EmbeddingBackend(Protocol):
    """A context that converts whole sequences to vectors. Only the embedder thread may use the context."""

    max_tokens: int  # maximum number of tokens in one text
    batch_tokens: int  # tokens in the largest efficient batch of several texts; at most `max_tokens`
    max_texts: int
    n_embd: int  # dimensions of a vector
    per_token: bool  # whether there is a vector per token instead of one per text
    threads: int  # number of threads that compute a batch

    def set_threads(self, count: int) -> None:
        """Set the number of threads for later calls to `embed`."""
        ...

    def rest(self) -> None:
        """Stop idle compute threads before a period in which the context is not used."""
        ...

    def embed(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Return one array per text, as output by the model. Raises DecodeError.

        Each array has the shape [n_embd], or [tokens, n_embd] if `per_token` is true. The texts may have at most
        `max_tokens` tokens in total.
        """
        ...

    def close(self) -> None: ...
