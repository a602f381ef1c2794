"""A model file in memory: its weights and its vocabulary."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import llama_cpp.llama_cpp as lib

from cellama.engine.backend import ModelInfo
from cellama.engine.errors import AdapterLoadFailed, EngineStopped, InvalidRequest, ModelLoadFailed
from cellama.engine.grammar.grammars import Grammars
from cellama.engine.llama.files.adapter_file import check_adapter_file
from cellama.engine.llama.files.gguf_file import fingerprint
from cellama.engine.llama.files.pretokenizers import PreTokenizer
from cellama.engine.sampling.dry import Breakers, find_breaker, joined
from cellama.engine.text.markup import SpecialToken, tokenize_marked

from . import log as llama_log

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0  # seconds for calls that use the weights, such as tokenizing, to return
_CONTROL = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
_USER_DEFINED = lib.LLAMA_TOKEN_ATTR_USER_DEFINED
_MAX_BREAKERS = 256  # texts whose tokens are kept: finding them reads the whole vocabulary
_MAX_SPELLINGS = 512  # texts whose tokens are kept: forced parts of schemas repeat from request to request


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"character {error.start} of the text is half of a surrogate pair; send both halves"
        ) from None


@functools.cache
def initialise() -> None:
    """Makes llama.cpp ready, once."""
    llama_log.install()
    lib.llama_backend_init()


@functools.cache
def _has_amx() -> bool:
    """True if llama.cpp was built with kernels for the CPU's matrix tiles, which may end the process.

    GCC 12 leaves out what gives the tiles their shapes, and the first decode call with quantized weights is a fault;
    built otherwise, Linux may refuse the tiles to llama.cpp's threads (its pull request 26954).
    """
    if b"AMX_INT8 = 1" not in lib.llama_print_system_info():
        return False
    log.warning(
        "llama.cpp was built with AMX, which may crash, so its rearranged weights are not used; a build without AMX "
        "has them, and reads Q4_0 faster: docs/how-to/install.md, Build for another CPU"
    )
    return True


class Lifetime:
    """Counts who uses something just now; its end waits for them, and refuses those who come later. Any thread.

    with lifetime:  # raises EngineStopped after the end
        ...         # it is there
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._num_users = 0
        self._ended = False
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            if self._ended:
                raise EngineStopped(f"{self._what} is unloaded and can't be used any more; load it again")
            self._num_users += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._num_users -= 1
            if self._ended:
                self._changed.notify_all()

    def end(self, timeout_s: float) -> bool:
        """Refuses users from now on; True once the last one has gone, False if that takes longer. Idempotent."""
        with self._changed:
            self._ended = True
            return self._changed.wait_for(lambda: not self._num_users, timeout_s)


class LlamaModel:
    """The weights of one GGUF file, shared by its contexts, which must be closed before it.

    It is its own Vocabulary: tokenizing and looking up tokens is safe from any thread.
    """

    def __init__(self, path: Path, *, n_gpu_layers: int = -1, vocab_only: bool = False, dry: bool = False) -> None:
        """Loads the file. Raises ModelLoadFailed.

        With `vocab_only` it can do no more than tokenize. With `dry` there are no weights, and its contexts have no
        cells: they say in the log what they would take (llama.h: no_alloc), and must not be used.
        """
        initialise()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.vocab_only = vocab_only
        params.use_extra_bufts = not _has_amx()
        if dry:
            params.no_alloc = True
            params.load_mode = lib.LLAMA_LOAD_MODE_NONE
        llama_log.take_errors()
        with llama_log.capture() as self.load_log:
            self.pointer = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise ModelLoadFailed(
                f"llama.cpp can't load {str(path)!r}: {llama_log.take_errors() or 'no reason given'}; "
                "the file may be damaged or of an unsupported kind: fetch or convert it again"
            )
        self.path = path
        self.lifetime = Lifetime(f"model {str(path)!r}")
        self.vocab = lib.llama_model_get_vocab(self.pointer)
        self.info = self._read_info("" if vocab_only or dry else fingerprint(path))
        has_words = lib.llama_vocab_type(self.vocab) == lib.LLAMA_VOCAB_TYPE_BPE
        self._pre_tokenizer = PreTokenizer(self.metadata("tokenizer.ggml.pre") or "" if has_words else None)
        self._pieces: list[bytes | None] = [None] * self.info.n_vocab
        ids = range(0 if vocab_only or dry else self.info.n_vocab)  # what does not generate needs none
        self._ends = frozenset(token for token in ids if lib.llama_vocab_is_eog(self.vocab, token))
        # llama.cpp looks at all adapters of a model when it makes a graph: none comes or goes meanwhile.
        self.adapters_lock = threading.Lock()
        self._breaker = functools.lru_cache(_MAX_BREAKERS)(self._find_breaker)
        self._adapters: set[int] = set()

    @functools.cached_property
    def grammars(self) -> Grammars:
        """The grammars that were used lately, over this vocabulary. Made with the first; any thread."""
        pieces = [self.token_bytes(token) for token in range(self.info.n_vocab)]
        controls = {special.id: special.text.encode() for special in self.special_tokens if special.is_control}
        return Grammars(pieces, controls, self._ends, functools.lru_cache(_MAX_SPELLINGS)(self._spell))

    def _spell(self, text: bytes) -> list[int]:
        """The tokens of a text in the middle of another one; none if they can't be known."""
        with contextlib.suppress(EngineStopped):
            return spelled(text, lambda part: self.tokenize(part, add_special=False), self.token_bytes)
        return []

    def breakers(self, texts: Sequence[str]) -> Breakers:
        """The tokens of DRY's sequence breakers. Any thread."""
        return joined(self._breaker(text) for text in texts)

    def _find_breaker(self, text: str) -> Breakers:
        return find_breaker(text.encode(), self.grammars.tokens.of, lambda s: self.tokenize(s, add_special=False))

    def _read_info(self, fingerprint: str) -> ModelInfo:
        description = ctypes.create_string_buffer(256)
        lib.llama_model_desc(self.pointer, description, len(description))
        return ModelInfo(
            architecture=self.metadata("general.architecture") or "unknown",
            description=description.value.decode(errors="replace"),
            n_params=lib.llama_model_n_params(self.pointer),
            size_bytes=lib.llama_model_size(self.pointer),
            n_ctx_train=lib.llama_model_n_ctx_train(self.pointer),
            n_vocab=lib.llama_vocab_n_tokens(self.vocab),
            n_embd=lib.llama_model_n_embd(self.pointer),
            file_type=(lib.llama_ftype_name(lib.llama_model_ftype(self.pointer)) or b"unknown").decode(),
            fingerprint=fingerprint,
        )

    def metadata(self, key: str) -> str | None:
        """A metadata value of the file as text, None if it has none."""
        with self.lifetime:
            length = lib.llama_model_meta_val_str(self.pointer, key.encode(), None, 0)
            if length < 0:
                return None
            buffer = ctypes.create_string_buffer(length + 1)
            lib.llama_model_meta_val_str(self.pointer, key.encode(), buffer, length + 1)
            return buffer.value.decode(errors="replace")

    def number(self, name: str) -> int | None:
        """A whole number from the metadata of the model's architecture, for instance "attention.key_length"."""
        value = self.metadata(f"{self.info.architecture}.{name}")
        return int(value) if value is not None and value.isdigit() else None

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the model's chat template."""
        with self.lifetime:
            template = lib.llama_model_chat_template(self.pointer, None)
            return template.decode(errors="replace") if template else None

    @property
    def end_tokens(self) -> frozenset[int]:
        return self._ends

    @functools.cached_property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens that `tokenize` puts before and behind every text: often a BOS, and an EOS or SEP for poolings."""
        with self.lifetime:
            both = tuple(self.tokenize(""))
            num_before = min(len(both), int(lib.llama_vocab_get_add_bos(self.vocab)))
        return both[:num_before], both[num_before:]

    @functools.cached_property
    def special_tokens(self) -> list[SpecialToken]:
        """What llama.cpp looks for in a text before it tokenizes the rest, the longest first."""
        found = []
        with self.lifetime:
            for token in range(self.info.n_vocab):
                attributes = lib.llama_vocab_get_attr(self.vocab, token)
                if attributes & (_CONTROL | _USER_DEFINED):
                    found.append(self._special_token(token, attributes))
        return sorted(found, key=lambda special: -len(special.text.encode()))

    def _special_token(self, token: int, attributes: int) -> SpecialToken:
        return SpecialToken(
            token,
            (lib.llama_vocab_get_text(self.vocab, token) or b"").decode(errors="replace"),
            is_control=bool(attributes & _CONTROL),
            strips_left=bool(attributes & lib.LLAMA_TOKEN_ATTR_LSTRIP),
            strips_right=bool(attributes & lib.LLAMA_TOKEN_ATTR_RSTRIP),
        )

    def special_text(self, which: str) -> str:
        """The text of the `bos` or `eos` token as templates write it, empty if the model has none."""
        with self.lifetime:
            token = {"bos": lib.llama_vocab_bos, "eos": lib.llama_vocab_eos}[which](self.vocab)
            return self._piece(token, special=True).decode(errors="replace") if token >= 0 else ""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        data = _encoded(text)
        return self._pre_tokenizer.run(text, lambda: self._tokenize(data, add_special, parse_special))

    def _tokenize(self, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
        size = len(data) + 8  # no more tokens than bytes, and a few special ones
        with self.lifetime:
            tokens = (ctypes.c_int32 * size)()
            count = lib.llama_tokenize(self.vocab, data, len(data), tokens, size, add_special, parse_special)
            if count < 0:
                size = -count
                tokens = (ctypes.c_int32 * size)()
                count = lib.llama_tokenize(self.vocab, data, len(data), tokens, size, add_special, parse_special)
        return list(tokens[:count])

    def tokenize_marked(self, text: str, marked: str, markup: frozenset[str] = frozenset()) -> list[int]:
        """As markup.tokenize_marked; nothing is added around it."""
        with self.lifetime:
            cuts = lib.llama_vocab_type(self.vocab) == lib.LLAMA_VOCAB_TYPE_BPE  # others would put a space there

        def tokenize(part: str, parse_special: bool) -> list[int]:
            return self.tokenize(part, add_special=False, parse_special=parse_special)

        return tokenize_marked(text, marked, self.special_tokens, markup if cuts else frozenset(), tokenize)

    def token_bytes(self, token: int) -> bytes:
        piece = self._pieces[token]
        if piece is None:
            piece = self._pieces[token] = self._piece(token, special=False)
        return piece

    def _piece(self, token: int, *, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        with self.lifetime:
            length = lib.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
            if length < 0:
                buffer = ctypes.create_string_buffer(-length)
                length = lib.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        return buffer.raw[:length]

    def is_end(self, token: int) -> bool:
        return token in self._ends

    def load_adapter(self, path: Path) -> int:
        """The address of a LoRA adapter that is in memory now. Raises AdapterLoadFailed."""
        check_adapter_file(path, self.info.architecture)
        with self.lifetime, self.adapters_lock:
            llama_log.take_errors()
            pointer = lib.llama_adapter_lora_init(self.pointer, str(path).encode())
            if not pointer:
                reason = llama_log.take_errors()
                raise AdapterLoadFailed(
                    f"llama.cpp can't use {str(path)!r} with this model: {reason}; take an adapter made for this model"
                )
            address = int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)
            self._adapters.add(address)
        return address

    def free_adapter(self, handle: int) -> None:
        """Frees an adapter that no context uses any more. Idempotent."""
        with self.adapters_lock:
            if handle in self._adapters:
                self._adapters.remove(handle)
                lib.llama_adapter_lora_free(adapter_pointer(handle))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Frees the adapters and the weights, once they are unused; False, and nothing is freed, if that takes longer.

        Whoever uses it later gets EngineStopped. Idempotent. No context of this model may be in use.
        """
        if not self.lifetime.end(timeout_s):
            return False
        with self.adapters_lock:
            for handle in self._adapters:
                lib.llama_adapter_lora_free(adapter_pointer(handle))
            self._adapters.clear()
            if self.pointer:
                lib.llama_model_free(self.pointer)
                self.pointer = None
        return True


def adapter_pointer(address: int) -> Any:
    """An adapter's address as llama_cpp wants it."""
    return ctypes.cast(ctypes.c_void_p(address), lib.llama_adapter_lora_p_ctypes)


def spelled(text: bytes, tokenize: Callable[[str], list[int]], piece_of: Callable[[int], bytes]) -> list[int]:
    """The tokens of a text, none if they can't be known.

    Some vocabularies put a space before a text: then it is looked for behind a line's end.
    """
    readable = text.decode(errors="ignore")  # it may end within a character
    wanted = readable.encode()
    if not text.startswith(wanted):
        return []
    for head in ("", "\n"):
        tokens = tokenize(head + readable)
        pieces = [piece_of(token) for token in tokens]
        for first in range(min(3, len(tokens))):
            if b"".join(pieces[first:]) == wanted:
                return tokens[first:]
    return []
