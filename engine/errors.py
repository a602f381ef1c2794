"""The errors of the engine, and checks that raise them.

Errors are passed to other processes by code, not as exception objects. `tasks/contract/codes.py` describes each code
for callers.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import ClassVar, TypeGuard


class EngineError(Exception):
    """The engine could not do what a caller requested. `str(error)` is a message for people."""

    code: ClassVar[str] = "engine_error"


class InvalidRequest(EngineError):
    """A parameter or a text is wrong. The message names the parameter, its value and the remedy."""

    code = "invalid_request"


class PromptTooLong(InvalidRequest):
    """The prompt can never fit into the context of a slot."""

    code = "prompt_too_long"


class TemplateFailed(EngineError):
    """The chat template rejected the messages or took too long, or the model has no chat template."""

    code = "template_failed"


class WrongCapability(EngineError):
    """The model is not loaded for this use."""

    code = "wrong_capability"


class ModelNotLoaded(EngineError):
    """No loaded model has this id."""

    code = "unknown_model"


class ModelLoadFailed(EngineError):
    """The source is missing, damaged or not supported. No part of the model stays in memory."""

    code = "model_load_failed"


class IdTaken(ModelLoadFailed):
    """Another model, or another adapter of the same model, already has this id."""

    code = "id_taken"


class InsufficientMemory(ModelLoadFailed):
    """The model needs more memory than is available. The attributes name the device and the sizes."""

    code = "insufficient_memory"

    def __init__(self, message: str, device: str, required_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.device = device
        self.required_bytes = required_bytes
        self.available_bytes = available_bytes


class AdapterLoadFailed(EngineError):
    """The file is missing, damaged, not a LoRA adapter, or made for another model."""

    code = "adapter_load_failed"


class UnknownAdapter(EngineError):
    """The model has no adapter with this name."""

    code = "unknown_adapter"


class UnknownKey(EngineError):
    """No context with this key is stored here for these adapters and this scope."""

    code = "unknown_key"


class AdapterBusy(EngineError):
    """Requests were still using the adapter when the timeout expired. It stays loaded and available."""

    code = "adapter_busy"


class ManagerExists(EngineError):
    """The process already has an open ModelManager."""

    code = "manager_exists"


class ModelBusy(EngineError):
    """Requests were still using the model when the timeout expired. It stays loaded and available."""

    code = "model_busy"


class QueueFull(EngineError):
    """`max_queue` requests are already waiting. The handle of the request raises this error."""

    code = "queue_full"


class DecodeFailed(EngineError):
    """llama.cpp rejected the tokens of one request (llama.h: llama_decode, llama_encode). Others are not affected."""

    code = "decode_failed"


class RequestFailed(EngineError):
    """An unexpected error affected this request. The error is logged, and other requests continue."""

    code = "internal_error"


class GrammarFailed(EngineError):
    """The grammar, the logit biases and `ignore_eos` together allow no token."""

    code = "grammar_failed"


class EmbeddingCancelled(EngineError):
    """An embedding was cancelled. A cancelled generation ends with the finish reason `cancelled` instead."""

    code = "cancelled"


class EngineStopped(EngineError):
    """The engine was closed, or its thread failed. It accepts no more requests."""

    code = "engine_stopped"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the last part of a message about an unknown name: the most similar known name, or all known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names) or 'none'}"


def check(ok: bool, name: str, value: object, condition: str) -> None:
    """Raise InvalidRequest unless `ok` is true. The message names the value and the condition that it must meet."""
    if not ok:
        raise InvalidRequest(f"{name} is {value!r}; it must be {condition}")


def is_real(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def check_length(name: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise InvalidRequest(f"{name} has {len(text)} characters, but the limit is {limit}; shorten it")


def check_number(name: str, count: int, limit: int, unit: str) -> None:
    if count > limit:
        raise InvalidRequest(f"{name} has {count} {unit}, but the limit is {limit}; remove some")


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    check(ok, name, value, f"a whole number, {low} or more" if high is None else f"a whole number from {low} to {high}")
