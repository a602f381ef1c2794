"""A loaded model file: weights, vocabulary and adapters."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import llama_cpp.llama_cpp as lib

from cellama.config.logging import event_logger
from cellama.engine.backend import ModelInfo
from cellama.engine.errors import AdapterLoadFailed, EngineStopped, InvalidRequest, ModelLoadFailed
from cellama.engine.grammar.grammars import Grammars
from cellama.engine.llama.ggml_backends import initialise
from cellama.engine.llama.gguf_files import check_adapter_file, fingerprint
from cellama.engine.llama.pretokenizers import PreTokenizer
from cellama.engine.options import ROPE_OPTIONS, EngineOptions
from cellama.engine.sampling.dry import Breakers, find_breaker, joined
from cellama.engine.text.markup import SpecialToken, tokenize_marked

from . import log as llama_log
from .placement import ModelParams

log = event_logger(__name__)

CLOSE_TIMEOUT_S = 30.0  # seconds to wait for calls that use the weights, such as tokenizing
_CONTROL = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
_USER_DEFINED = lib.LLAMA_TOKEN_ATTR_USER_DEFINED
_MAX_BREAKERS = 256  # cached texts; finding the tokens of a text reads the whole vocabulary
_MAX_SPELLINGS = 512  # cached texts; requests with the same schema have the same forced texts


def _encode(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text has an unpaired surrogate at character {error.start}; send the whole pair"
        ) from None


@functools.cache
def _has_amx() -> bool:
    """Return whether llama.cpp was built with AMX kernels, which can crash the process.

    Builds made with GCC 12 lack the instructions that configure the AMX tiles, and crash in the first decode call with
    quantized weights. With other compilers, Linux can prevent llama.cpp's threads from using the tiles (llama.cpp's
    pull request 26954).
    """
    if b"AMX_INT8 = 1" not in lib.llama_print_system_info():
        return False
    log.warning(
        "AMX disabled",
        detail="llama.cpp was built with AMX, which can crash; a build without AMX prefills Q4_0 faster "
        "(docs/how-to/install.md, Build for another CPU)",
    )
    return True


def fingerprint_of(path: Path, options: EngineOptions) -> str:
    """Return an id of a file's content and of the options that override the file's settings. Raises ModelLoadFailed."""
    given = {name: value for name in ROPE_OPTIONS if (value := getattr(options, name)) is not None}
    overrides = sorted((options.kv_overrides or {}).items())
    content = fingerprint(path)
    if not given and not overrides:
        return content
    return hashlib.sha256(repr((content, given, overrides)).encode()).hexdigest()


class Lifetime:
    """Counts an object's users.

    Closing the object rejects new users and waits for current users. This class is thread-safe.

    with lifetime:  # raises EngineStopped after the object was closed
        ...  # use the object
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_users = 0
        self._ended = False
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            if self._ended:
                raise EngineStopped(f"{self._name} has been unloaded; load it again")
            self._num_users += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._num_users -= 1
            if self._ended:
                self._changed.notify_all()

    def end(self, timeout_s: float) -> bool:
        """Reject new users and wait until the last user has finished. Return False after `timeout_s`.

        Repeated calls are allowed.
        """
        with self._changed:
            self._ended = True
            return self._changed.wait_for(lambda: not self._num_users, timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class FimTokens:
    """The fill-in-the-middle tokens of a vocabulary. If the vocabulary doesn't have a token, its id is -1."""

    prefix: int
    suffix: int
    middle: int
    repository: int
    file: int


class LlamaModel:
    """The weights of a GGUF file, shared by its contexts. The contexts must be closed before the model.

    The model also implements Vocabulary. Any thread may tokenize and look up tokens.
    """

    def __init__(
        self, path: Path, options: EngineOptions | None = None, *, vocab_only: bool = False, dry: bool = False
    ) -> None:
        """Load the file. `options` place the weights on devices. Raises ModelLoadFailed and InvalidRequest.

        With `vocab_only`, the model can only tokenize. With `dry`, the model has no weights, and its contexts have no
        cells. llama.cpp logs the contexts' buffer sizes (no_alloc in llama.h), but the contexts must not be used.
        """
        initialise()
        placed = ModelParams(options or EngineOptions())
        params = placed.value
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
                "the file may be damaged or unsupported; download or convert it again"
            )
        self.path = path
        self.devices, self.tensor_overrides = placed.devices, placed.overrides
        self.lifetime = Lifetime(f"model {str(path)!r}")
        self.vocab = lib.llama_model_get_vocab(self.pointer)
        self.info = self._read_info("" if vocab_only or dry else fingerprint_of(path, options or EngineOptions()))
        has_words = lib.llama_vocab_type(self.vocab) == lib.LLAMA_VOCAB_TYPE_BPE
        self._pre_tokenizer = PreTokenizer(self.metadata("tokenizer.ggml.pre") or "" if has_words else None)
        self._pieces: list[bytes | None] = [None] * self.info.n_vocab
        ids = range(0 if vocab_only or dry else self.info.n_vocab)  # only generation needs them
        self._ends = frozenset(token for token in ids if lib.llama_vocab_is_eog(self.vocab, token))
        # llama.cpp reads all adapters of a model when it builds a graph, so none may be added or freed at the same
        # time.
        self.adapters_lock = threading.Lock()
        self._breaker = functools.lru_cache(_MAX_BREAKERS)(self._find_breaker)
        self._adapters: set[int] = set()

    @functools.cached_property
    def grammars(self) -> Grammars:
        """The cache of compiled grammars for this vocabulary. The cache is thread-safe."""
        pieces = [self.token_bytes(token) for token in range(self.info.n_vocab)]
        controls = {special.id: special.text.encode() for special in self.special_tokens if special.is_control}
        return Grammars(pieces, controls, self._ends, functools.lru_cache(_MAX_SPELLINGS)(self._spell))

    def _spell(self, text: bytes) -> list[int]:
        """Return the tokens of a string inside a longer text, or an empty list if the tokens can't be determined."""
        with contextlib.suppress(EngineStopped):
            return spell(text, lambda part: self.tokenize(part, add_special=False), self.token_bytes)
        return []

    def breakers(self, texts: Sequence[str]) -> Breakers:
        """Return the tokens of these sequence breakers, which the DRY sampler uses. Any thread may call this method."""
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
        """Return a metadata value as text, or None if the file doesn't contain the key."""
        with self.lifetime:
            length = lib.llama_model_meta_val_str(self.pointer, key.encode(), None, 0)
            if length < 0:
                return None
            buffer = ctypes.create_string_buffer(length + 1)
            lib.llama_model_meta_val_str(self.pointer, key.encode(), buffer, length + 1)
            return buffer.value.decode(errors="replace")

    def number(self, name: str) -> int | None:
        """Return an integer from the architecture's metadata, such as the value of "attention.key_length", or None."""
        value = self.metadata(f"{self.info.architecture}.{name}")
        return int(value) if value is not None and value.isdigit() else None

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the model's chat template, or None if the model has no chat template."""
        with self.lifetime:
            template = lib.llama_model_chat_template(self.pointer, None)
            return template.decode(errors="replace") if template else None

    @property
    def end_tokens(self) -> frozenset[int]:
        return self._ends

    @functools.cached_property
    def added_tokens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens that `tokenize` adds before and after a text, such as BOS before and EOS or SEP after the text."""
        with self.lifetime:
            both = tuple(self.tokenize(""))
            num_before = min(len(both), int(lib.llama_vocab_get_add_bos(self.vocab)))
        return both[:num_before], both[num_before:]

    @functools.cached_property
    def special_tokens(self) -> list[SpecialToken]:
        """The special tokens that llama.cpp searches for before it tokenizes the rest of a text, longest first."""
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

    def special_text(self, name: str) -> str:
        """Return the text of the `bos` or `eos` token for templates, or "" if the model doesn't have the token."""
        with self.lifetime:
            token = {"bos": lib.llama_vocab_bos, "eos": lib.llama_vocab_eos}[name](self.vocab)
            return self._piece(token, special=True).decode(errors="replace") if token >= 0 else ""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        data = _encode(text)
        return self._pre_tokenizer.run(text, lambda: self._tokenize(data, add_special, parse_special))

    def _tokenize(self, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
        size = len(data) + 8  # at most one token per byte, and a few special tokens
        with self.lifetime:
            tokens = (ctypes.c_int32 * size)()
            count = lib.llama_tokenize(self.vocab, data, len(data), tokens, size, add_special, parse_special)
            if count < 0:
                size = -count
                tokens = (ctypes.c_int32 * size)()
                count = lib.llama_tokenize(self.vocab, data, len(data), tokens, size, add_special, parse_special)
        return list(tokens[:count])

    def tokenize_marked(self, text: str, marked: str, markup: frozenset[str] = frozenset()) -> list[int]:
        """Tokenize a prompt as `markup.tokenize_marked` does, without adding tokens before or after the prompt."""
        with self.lifetime:
            cuts = (
                lib.llama_vocab_type(self.vocab) == lib.LLAMA_VOCAB_TYPE_BPE
            )  # other vocabularies add a space at a cut

        def tokenize(part: str, parse_special: bool) -> list[int]:
            return self.tokenize(part, add_special=False, parse_special=parse_special)

        return tokenize_marked(text, marked, self.special_tokens, markup if cuts else frozenset(), tokenize)

    def piece_of(self, token: int) -> bytes:
        """Return a token's bytes. For a control token, return its text."""
        return self.token_bytes(token) or self._piece(token, special=True)

    @functools.cached_property
    def fim_tokens(self) -> FimTokens:
        """The model's fill-in-the-middle tokens."""
        with self.lifetime:
            return FimTokens(
                prefix=lib.llama_vocab_fim_pre(self.vocab),
                suffix=lib.llama_vocab_fim_suf(self.vocab),
                middle=lib.llama_vocab_fim_mid(self.vocab),
                repository=lib.llama_vocab_fim_rep(self.vocab),
                file=lib.llama_vocab_fim_sep(self.vocab),
            )

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
        """Load a LoRA adapter and return its address. Raises AdapterLoadFailed."""
        check_adapter_file(path, self.info.architecture)
        with self.lifetime, self.adapters_lock:
            llama_log.take_errors()
            pointer = lib.llama_adapter_lora_init(self.pointer, str(path).encode())
            if not pointer:
                reason = llama_log.take_errors()
                raise AdapterLoadFailed(
                    f"llama.cpp can't use {str(path)!r} with this model: {reason}; use an adapter made for this model"
                )
            address = int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)
            self._adapters.add(address)
        return address

    def free_adapter(self, handle: int) -> None:
        """Free an adapter that no context uses. Repeated calls have no effect."""
        with self.adapters_lock:
            if handle in self._adapters:
                self._adapters.remove(handle)
                lib.llama_adapter_lora_free(adapter_pointer(handle))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait until the adapters and the weights are no longer in use, then free them. Repeated calls are allowed.

        All of the model's contexts must be closed first. If the model is still in use after `timeout_s`, nothing is
        freed, and the result is False. Any later use raises EngineStopped.
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
    """Return an adapter's address as a pointer for llama_cpp."""
    return ctypes.cast(ctypes.c_void_p(address), lib.llama_adapter_lora_p_ctypes)


def spell(text: bytes, tokenize: Callable[[str], list[int]], piece_of: Callable[[int], bytes]) -> list[int]:
    """Return the tokens of a text, or an empty list if the tokens can't be determined.

    Some vocabularies add a space before a text. In this case, the text is tokenized after a line break.
    """
    readable = text.decode(errors="ignore")  # the text may end within a character
    expected = readable.encode()
    if not text.startswith(expected):
        return []
    for head in ("", "\n"):
        tokens = tokenize(head + readable)
        pieces = [piece_of(token) for token in tokens]
        for first in range(min(3, len(tokens))):
            if b"".join(pieces[first:]) == expected:
                return tokens[first:]
    return []
