"""The interface between the engine and an inference library, which `llama/` and `fake.py` implement."""

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
    """A decode call failed with llama.cpp's return code (llama.h: llama_decode).

    The code is 1 if there are no free KV cells, 2 if the call was aborted, and -1 if the batch is invalid. Codes below
    -1 are fatal, and part of the batch may already have been computed.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"llama_decode returned {code}")
        self.code = code


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Describes a loaded model."""

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
    """A loaded adapter. `fingerprint` is the SHA-256 of its file, and `handle` identifies it in the backend."""

    name: str
    fingerprint: str
    handle: Any


class AdapterUse(NamedTuple):
    """An adapter, and the scale at which a decode call applies it. The scale is never 0."""

    adapter: Adapter
    scale: float


AdapterSet = tuple[AdapterUse, ...]  # ordered by fingerprint; () = the model without adapters
AdapterKey = tuple[tuple[str, float], ...]


def key_of(adapters: AdapterSet) -> AdapterKey:
    """Return the part of an adapter set that KV cells depend on: the contents and scales, not the names."""
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
        """The draft tokens. Tokens after them are only padding that makes chunks equally long."""
        return self.tokens[1 : 1 + self.num_drafts]


class Vocabulary(Protocol):
    """Converts text to tokens and back. Any thread may use it at any time."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, or no bytes for a control token."""
        ...

    def is_end(self, token: int) -> bool:
        """Return whether a token ends the generation."""
        ...


class Sampler(Protocol):
    """Samples the tokens of one sequence. Only the engine thread may use it."""

    @property
    def mirostat_mu(self) -> float | None:
        """The state of mirostat for `new_sampler`, or None if the request does not use mirostat."""
        ...

    def sample(self, slot: int, forced: int | None = None, row: int = 0) -> tuple[int, TokenLogprob | None]:
        """Return the next token, sampled from the logits of the last decode call for this slot.

        `row` is the number of draft tokens accepted before this token. If `forced` is given, this token is returned
        unless a grammar forbids it. Raises GrammarFailed.
        """
        ...

    def bind(self) -> None:
        """Apply the grammar, if there is one, to all tokens from now on."""
        ...

    def forced_tokens(self) -> list[int]:
        """Return tokens of the text that the grammar requires next, or an empty list if there is a choice.

        Other tokens may represent the same text.
        """
        ...


class SamplingPlan(Protocol):
    """The prepared sampling parameters of a request. Its samplers are created from them."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Requested features that are not enforced."""
        ...


class KvMemory(Protocol):
    """Accesses the KV cells on the device. The positions of a slot are contiguous and start at 0."""

    n_slots: int
    ctx_per_slot: int
    n_cells: int  # cells of all slots
    unified: bool  # whether all slots use one pool and can share cells; otherwise each slot has its own cells
    partial_reuse: bool  # whether a slot can be truncated at any time

    def first_cut(self, slot: int) -> int:
        """Return the smallest length to which a slot can be truncated. All greater lengths are also possible.

        The result is 0 if any length is possible, and never exceeds the current length. A slot can always be emptied.
        """
        ...

    def first_saved_cut(self, num_tokens: int) -> int:
        """Return the smallest length to which a saved state with `num_tokens` positions can be truncated."""
        ...

    def trim(self, slot: int, num_tokens: int, checkpoint: Any = None) -> bool:
        """Keep the first positions of a slot. If that is impossible, empty the slot and return False."""
        ...

    def copy(self, source: int, target: int, num_tokens: int, checkpoint: Any = None) -> bool:
        """Copy the first positions of `source` to the empty slot `target`. Return False if `target` is still empty."""
        ...

    def state_bytes(self, slot: int) -> int:
        """Return the `nbytes` that the result of `save` would have."""
        ...

    def save(self, slot: int) -> Any:
        """Return all cells of a slot as an object with the attribute `nbytes`."""
        ...

    def restore(self, slot: int, data: Any, num_tokens: int, checkpoint: Any = None) -> bool:
        """Restore the first positions of a saved state into an empty slot. Return False if the slot is still empty."""
        ...

    def portable(self, data: Any, num_tokens: int, *, checkpoint: bool = False) -> Buffer:
        """Return a saved state or a checkpoint in a format that doesn't depend on the number of slots.

        Any thread may call this. Raises ValueError if the state has no such format.
        """
        ...

    def from_portable(self, data: Buffer, *, checkpoint: bool = False) -> tuple[Any, int]:
        """Convert data from `portable` back to a state or checkpoint, and return it with its number of tokens.

        Any thread may call this. Writable buffers are not copied: the state takes them over and modifies them. Raises
        ValueError if the data is damaged.
        """
        ...

    def checkpoint_bytes(self, slot: int) -> int:
        """Return the `nbytes` that the result of `checkpoint` would have."""
        ...

    def checkpoint(self, slot: int) -> Any:
        """Return a checkpoint, which lets `trim`, `copy` and `restore` truncate a state to the current length."""
        ...


class AdapterStore(Protocol):
    """Holds the weights of adapters. Any thread may use it."""

    def load_adapter(self, path: Path) -> Any:
        """Load an adapter, and return its handle in the backend. Raises AdapterLoadFailed."""
        ...

    def free_adapter(self, handle: Any) -> None:
        """Free the memory of an adapter. Later decode calls must not use it."""
        ...


class Backend(KvMemory, AdapterStore, Protocol):
    """A context of the inference library, with the KV cells of all slots.

    Only the engine thread may use it, except for `vocabulary`, `prepare`, `abort` and the methods that load and free
    adapters.
    """

    n_vocab: int
    identity: bytes  # digest of what cells depend on, except tokens and adapters: weights, types, formats (ADR 014)
    threads: int  # number of threads that compute a decode call

    def set_threads(self, count: int) -> None:
        """Set the number of threads for later decode calls."""
        ...

    def rest(self) -> None:
        """Stop the waiting compute threads, because the context is about to be idle for a while."""
        ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    def prepare(self, params: SamplingParams, visible: Mapping[int, bytes] | None = None) -> SamplingPlan:
        """Prepare the sampling parameters of a request for `new_sampler`. This method does all of the slow work.

        `visible` contains the control tokens whose text belongs to the output. A grammar can't match any other control
        tokens. Raises InvalidRequest for an invalid grammar or an unknown token.
        """
        ...

    def decode(self, chunks: Sequence[Chunk], adapters: AdapterSet = ()) -> None:
        """Compute the KV cells of the chunks, which are in the order of their slots, with these adapters.

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
        """Return a sampler for the tokens that follow `history`.

        `plan` is a result of `prepare`. The last `num_sampled` tokens of `history` were sampled earlier. The grammar
        doesn't apply to the first `num_unbound` of these. If `num_unbound` is None, the grammar applies only after
        `bind` has been called. With `ban_end`, no end token is sampled. `mirostat_mu` is the mirostat state from which
        the sampler continues. Raises GrammarFailed.
        """
        ...

    def close(self) -> None: ...


class EmbeddingBackend(Protocol):
    """A context that turns whole sequences into vectors. Only the embedder thread may use it."""

    max_tokens: int  # maximum number of tokens in one text
    batch_tokens: int  # tokens in the largest efficient batch of several texts; at most `max_tokens`
    max_texts: int
    n_embd: int  # dimensions of a vector
    per_token: bool  # whether there is a vector per token instead of one per text
    threads: int  # number of threads that compute a batch

    def set_threads(self, count: int) -> None:
        """Set the number of threads for later calls of `embed`."""
        ...

    def rest(self) -> None:
        """Stop the waiting compute threads, because the context is about to be idle for a while."""
        ...

    def embed(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Return one array per text, as the model outputs it: [n_embd], or [tokens, n_embd] if `per_token` is true.

        The texts may have at most `max_tokens` tokens in total. Raises DecodeError.
        """
        ...

    def close(self) -> None: ...
