"""What the engine needs of an inference library. `llama/` and `fake.py` implement it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from .logprobs import TokenLogprob
from .sampling_params import SamplingParams

NO_FREE_CELLS, ABORTED = 1, 2  # llama.h: llama_decode; nothing of the batch counts, it may be tried again


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


@dataclass(frozen=True, eq=False, slots=True)
class Adapter:
    """A loaded adapter. `fingerprint` is the SHA-256 of its file, `handle` what the backend knows it by."""

    name: str
    fingerprint: str
    handle: Any


class AdapterUse(NamedTuple):
    """An adapter and how much of it a decode call applies; never 0."""

    adapter: Adapter
    scale: float


AdapterSet = tuple[AdapterUse, ...]  # in the order of fingerprints; () = the model as it is
AdapterKey = tuple[tuple[str, float], ...]


def key_of(adapters: AdapterSet) -> AdapterKey:
    """What KV cells depend on: contents and scales, not names."""
    return tuple((use.adapter.fingerprint, use.scale) for use in adapters)


class Chunk(NamedTuple):
    """Consecutive tokens of one slot in a step's batch."""

    slot: int
    position: int  # of the first token
    tokens: list[int]
    samples: bool  # the next token is sampled after the last one, or after the first and each draft: they need logits
    decode: bool = False  # the last generated token and drafts, not a part of the prompt
    num_drafts: int = 0  # tokens behind the first that may come next: the tokens after these are sampled, too

    @property
    def drafts(self) -> list[int]:
        """What may come next; more tokens behind them only make chunks equally long."""
        return self.tokens[1 : 1 + self.num_drafts]


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
    """Samples the tokens of one sequence. Engine thread only."""

    @property
    def mirostat_mu(self) -> float | None:
        """What mirostat has learned, for `new_sampler`; None without it."""
        ...

    def sample(self, slot: int, forced: int | None = None, row: int = 0) -> tuple[int, TokenLogprob | None]:
        """The next token, from the logits that the last decode left for this slot. Raises GrammarFailed.

        With drafts `row` counts the drafts that were right before it.
        It is `forced`, if that is given and no grammar forbids it.
        """
        ...

    def bind(self) -> None:
        """The grammar, if there is one, holds for the tokens from now on."""
        ...

    def forced_tokens(self) -> list[int]:
        """The tokens of a text that a grammar leaves no choice about; empty without one. Other tokens may spell it."""
        ...


class SamplingPlan(Protocol):
    """What the samplers of one request are made from."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the request asks for and is not enforced."""
        ...


class KvMemory(Protocol):
    """The device's cells. Positions of a slot are dense from 0."""

    n_slots: int
    ctx_per_slot: int
    n_cells: int  # in all
    unified: bool  # one pool for all slots, in which slots can share cells; else each has its own
    partial_reuse: bool  # a slot can give up its last positions at any time

    def first_cut(self, slot: int) -> int:
        """The least length from which on a slot can be cut back to any length: 0, or up to all that it holds.

        It can always be emptied.
        """
        ...

    def first_saved_cut(self, num_tokens: int) -> int:
        """The same for so many positions that were saved."""
        ...

    def trim(self, slot: int, num_tokens: int, checkpoint: Any = None) -> bool:
        """Keeps the first positions of a slot. False: the memory can't, and the slot is empty now."""
        ...

    def copy(self, source: int, target: int, num_tokens: int, checkpoint: Any = None) -> bool:
        """Gives the empty slot `target` the first positions of `source`. False: `target` is still empty."""
        ...

    def state_bytes(self, slot: int) -> int:
        """The `nbytes` of what `save` would give."""
        ...

    def save(self, slot: int) -> Any:
        """All cells of a slot as something with `nbytes`."""
        ...

    def restore(self, slot: int, data: Any, num_tokens: int, checkpoint: Any = None) -> bool:
        """Gives an empty slot the first positions of what was saved. False: it is still empty."""
        ...

    def portable(self, data: Any, num_tokens: int, *, checkpoint: bool = False) -> Buffer:
        """What was saved of so many tokens, or a checkpoint, in a form that does not depend on the number of slots.

        Any thread. ValueError where that can't be had.
        """
        ...

    def from_portable(self, data: Buffer, *, checkpoint: bool = False) -> tuple[Any, int]:
        """The same for `restore`, or as its checkpoint, and of how many tokens. Any thread. ValueError if damaged.

        What may be written to is taken over, and changed: no copy is made of it.
        """
        ...

    def checkpoint_bytes(self, slot: int) -> int:
        """The `nbytes` of what `checkpoint` would give."""
        ...

    def checkpoint(self, slot: int) -> Any:
        """What `trim`, `copy` and `restore` take to cut this slot's state, or a copy, back to the length it has now."""
        ...


class AdapterStore(Protocol):
    """Where the weights of adapters are. Any thread."""

    def load_adapter(self, path: Path) -> Any:
        """What the backend knows the adapter by. Raises AdapterLoadFailed."""
        ...

    def free_adapter(self, handle: Any) -> None:
        """Gives the memory back. No decode call may use the adapter now or later."""
        ...


class Backend(KvMemory, AdapterStore, Protocol):
    """A context with the cells of all slots.

    Engine thread only, except `vocabulary`, `prepare`, `abort` and what loads and frees adapters.
    """

    n_vocab: int
    identity: bytes  # a digest of what cells depend on beside tokens and adapters: weights, types, formats (ADR 014)
    threads: int  # that a decode call computes with

    def set_threads(self, count: int) -> None:
        """The next decode call computes with so many threads."""
        ...

    def rest(self) -> None:
        """Nothing is computed for a while: threads that wait for work end."""
        ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    def prepare(self, params: SamplingParams, visible: Mapping[int, bytes] | None = None) -> SamplingPlan:
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
        num_sampled: int = 0,
        num_unbound: int | None = 0,
        mirostat_mu: float | None = None,
    ) -> Sampler:
        """A sampler for what follows `history`, of whose tokens the last `num_sampled` were sampled before.

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

    def rest(self) -> None:
        """As Backend.rest."""
        ...

    def embed(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """One array per text, as the model gives it: [n_embd], or [tokens, n_embd] if `per_token`.

        Together at most `max_tokens` tokens. Raises DecodeError.
        """
        ...

    def close(self) -> None: ...
