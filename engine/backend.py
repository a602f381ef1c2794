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

NO_FREE_CELLS, ABORTED = 1, 2  # llama.h: llama_decode; nothing of the batch was computed, and a retry is allowed


class DecodeError(Exception):
    """A decode call failed with llama.cpp's return code (llama.h: llama_decode).

    1 means no free KV cells, 2 aborted, and -1 an invalid batch. Codes below -1 are fatal, and a part of the batch may
    have been computed.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"llama_decode returned {code}")
        self.code = code


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The description of a loaded model."""

    architecture: str
    description: str  # in llama.cpp's words, for example "llama 1B Q8_0"
    n_params: int
    size_bytes: int
    n_ctx_train: int
    n_vocab: int
    n_embd: int
    file_type: str = ""  # quantisation, for example "Q8_0"
    fingerprint: str = ""  # identifies the content of the file (llama/files/gguf_file.py); empty for a vocabulary alone


@dataclass(frozen=True, eq=False, slots=True)
class Adapter:
    """A loaded adapter. `fingerprint` is the SHA-256 of its file, and `handle` identifies it in the backend."""

    name: str
    fingerprint: str
    handle: Any


class AdapterUse(NamedTuple):
    """An adapter, and the scale with which a decode call applies it. The scale is never 0."""

    adapter: Adapter
    scale: float


AdapterSet = tuple[AdapterUse, ...]  # ordered by fingerprint; () = the model without adapters
AdapterKey = tuple[tuple[str, float], ...]


def key_of(adapters: AdapterSet) -> AdapterKey:
    """Return the part of an adapter set that KV cells depend on: contents and scales, not names."""
    return tuple((use.adapter.fingerprint, use.scale) for use in adapters)


class Chunk(NamedTuple):
    """Consecutive tokens of one slot in a step's batch."""

    slot: int
    position: int  # position of the first token
    tokens: list[int]
    samples: bool  # needs logits: the next token is sampled after the last token, or after the first and each draft
    decode: bool = False  # the last generated token and drafts, rather than a part of the prompt
    num_drafts: int = 0  # draft tokens after the first one; a token is also sampled after each of them

    @property
    def drafts(self) -> list[int]:
        """The draft tokens. Tokens after them are only padding that makes chunks equally long."""
        return self.tokens[1 : 1 + self.num_drafts]


class Vocabulary(Protocol):
    """Converts text to tokens and back. Any thread may use it at any time."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; empty for a control token."""
        ...

    def is_end(self, token: int) -> bool:
        """Return whether a token ends a generation."""
        ...


class Sampler(Protocol):
    """Samples the tokens of one sequence. Engine thread only."""

    @property
    def mirostat_mu(self) -> float | None:
        """The state of mirostat, which `new_sampler` accepts; None without mirostat."""
        ...

    def sample(self, slot: int, forced: int | None = None, row: int = 0) -> tuple[int, TokenLogprob | None]:
        """Return the next token, sampled from the logits of the last decode call for this slot.

        `row` is the number of accepted drafts before it. With `forced`, this token is returned unless a grammar forbids
        it. Raises GrammarFailed.
        """
        ...

    def bind(self) -> None:
        """Apply the grammar, if there is one, to all tokens from now on."""
        ...

    def forced_tokens(self) -> list[int]:
        """Return the tokens of a text that the grammar requires next; empty if there is a choice.

        Other tokens may spell the same text.
        """
        ...


class SamplingPlan(Protocol):
    """The prepared sampling parameters of a request, from which its samplers are created."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Requested features that are not enforced."""
        ...


class KvMemory(Protocol):
    """The KV cells of the device. Positions of a slot are contiguous and start at 0."""

    n_slots: int
    ctx_per_slot: int
    n_cells: int  # cells of all slots
    unified: bool  # whether all slots use one pool and can share cells; otherwise each slot has its own cells
    partial_reuse: bool  # whether a slot can be truncated at any time

    def first_cut(self, slot: int) -> int:
        """Return the smallest length to which a slot can be truncated; greater lengths are also possible.

        0 if any length is possible, and at most the current length. A slot can always be emptied.
        """
        ...

    def first_saved_cut(self, num_tokens: int) -> int:
        """Return the smallest length to which a saved state of `num_tokens` positions can be truncated."""
        ...

    def trim(self, slot: int, num_tokens: int, checkpoint: Any = None) -> bool:
        """Keep the first positions of a slot. Return False if that is impossible; the slot is then empty."""
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
        """Restore the first positions of a saved state into an empty slot. Return False if it is still empty."""
        ...

    def portable(self, data: Any, num_tokens: int, *, checkpoint: bool = False) -> Buffer:
        """Return a saved state or a checkpoint in a format that doesn't depend on the number of slots.

        Any thread. Raises ValueError if the state has no such format.
        """
        ...

    def from_portable(self, data: Buffer, *, checkpoint: bool = False) -> tuple[Any, int]:
        """Return a state for `restore`, or a checkpoint, and its number of tokens.

        Any thread. Writable buffers are not copied: the state takes them over and modifies them. Raises ValueError if
        the data is damaged.
        """
        ...

    def checkpoint_bytes(self, slot: int) -> int:
        """Return the `nbytes` that the result of `checkpoint` would have."""
        ...

    def checkpoint(self, slot: int) -> Any:
        """Return a checkpoint, with which `trim`, `copy` and `restore` can truncate a state to the current length."""
        ...


class AdapterStore(Protocol):
    """Holds the weights of adapters. Any thread."""

    def load_adapter(self, path: Path) -> Any:
        """Load an adapter, and return its handle in the backend. Raises AdapterLoadFailed."""
        ...

    def free_adapter(self, handle: Any) -> None:
        """Free the memory of an adapter. No decode call may use it from now on."""
        ...


class Backend(KvMemory, AdapterStore, Protocol):
    """A context with the cells of all slots.

    Engine thread only, except `vocabulary`, `prepare`, `abort` and the methods that load and free adapters.
    """

    n_vocab: int
    identity: bytes  # digest of all that cells depend on except tokens and adapters: weights, types, formats (ADR 014)
    threads: int  # number of threads that compute a decode call

    def set_threads(self, count: int) -> None:
        """Set the number of threads for later decode calls."""
        ...

    def rest(self) -> None:
        """Stop threads that wait for work, because the context will be idle for a while."""
        ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    def prepare(self, params: SamplingParams, visible: Mapping[int, bytes] | None = None) -> SamplingPlan:
        """Prepare the sampling parameters of a request for `new_sampler`. All slow work is done here.

        `visible` are control tokens whose text belongs to the output, and the only ones that a grammar sees. Raises
        InvalidRequest for an invalid grammar or an unknown token.
        """
        ...

    def decode(self, chunks: Sequence[Chunk], adapters: AdapterSet = ()) -> None:
        """Compute the KV cells of the chunks, which are in order of slots, with these adapters.

        Returns after the computation has finished, also on a GPU. Raises DecodeError.
        """
        ...

    def abort(self) -> None:
        """Abort the current decode call, or the next one, with code 2."""
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
        """Return a sampler for the tokens after `history`, of which the last `num_sampled` were sampled before.

        `plan` is a result of `prepare`. The grammar doesn't apply to the first `num_unbound` of the sampled tokens;
        with None it applies after a call of `bind`. With `ban_end` no end token is sampled. `mirostat_mu` is the state
        of the sampler that this one continues. Raises GrammarFailed.
        """
        ...

    def close(self) -> None: ...


class EmbeddingBackend(Protocol):
    """A context that turns whole sequences into vectors. Embedder thread only."""

    max_tokens: int  # limit for one text
    batch_tokens: int  # largest efficient size of a batch of several texts; at most `max_tokens`
    max_texts: int
    n_embd: int  # dimensions of a vector
    per_token: bool  # whether there is a vector per token instead of one per text
    threads: int  # number of threads that compute a batch

    def set_threads(self, count: int) -> None:
        """Set the number of threads for later calls of `embed`."""
        ...

    def rest(self) -> None:
        """Stop threads that wait for work, because the context will be idle for a while."""
        ...

    def embed(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Return one array per text, as the model outputs it: [n_embd], or [tokens, n_embd] if `per_token`.

        The texts may have `max_tokens` tokens in total. Raises DecodeError.
        """
        ...

    def close(self) -> None: ...
