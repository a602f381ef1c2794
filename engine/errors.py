"""The engine's errors, and checks that raise them.

Errors are passed to other processes as codes, not as exception objects. `tasks/contract/codes.py` describes each code
for callers.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import ClassVar, TypeGuard


class EngineError(Exception):
    """The engine can't do what the caller requested. `str(error)` is a human-readable message."""

    code: ClassVar[str] = "engine_error"


class InvalidRequest(EngineError):
    """A parameter or an input is invalid. The message contains the name, the value and a remedy."""

    code = "invalid_request"


class PromptTooLong(InvalidRequest):
    """The prompt can never fit into a slot's context."""

    code = "prompt_too_long"


class TemplateFailed(EngineError):
    """The chat template rejected the messages or took too long, or the model doesn't have a chat template."""

    code = "template_failed"


class WrongCapability(EngineError):
    """The model was not loaded with the required capability."""

    code = "wrong_capability"


class ModelNotLoaded(EngineError):
    """No loaded model has this id."""

    code = "unknown_model"


class ModelLoadFailed(EngineError):
    """The model's source is missing, damaged or not supported. No part of the model stays in memory."""

    code = "model_load_failed"


class IdTaken(ModelLoadFailed):
    """Another model, or another adapter of the same model, is already using this id."""

    code = "id_taken"


class InsufficientMemory(ModelLoadFailed):
    """The model needs more memory than is available.

    The attributes contain the device, and the required and available bytes.
    """

    code = "insufficient_memory"

    def __init__(self, message: str, device: str, required_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.device = device
        self.required_bytes = required_bytes
        self.available_bytes = available_bytes


class AdapterLoadFailed(EngineError):
    """The adapter's file is missing or damaged, is not a LoRA adapter, or was made for another model."""

    code = "adapter_load_failed"


class UnknownAdapter(EngineError):
    """The model doesn't have an adapter with this name."""

    code = "unknown_adapter"


class UnknownKey(EngineError):
    """The engine doesn't have a context with this key, scope and adapters."""

    code = "unknown_key"


class AdapterBusy(EngineError):
    """The adapter was still in use when the timeout expired. The adapter stays loaded and available."""

    code = "adapter_busy"


class ManagerExists(EngineError):
    """The process already has an open ModelManager."""

    code = "manager_exists"


class ModelBusy(EngineError):
    """The model was still in use when the timeout expired. The model stays loaded and available."""

    code = "model_busy"


class QueueFull(EngineError):
    """The maximum number of requests (`max_queue`) is already waiting. The request's handle raises this error."""

    code = "queue_full"


class DecodeFailed(EngineError):
    """llama.cpp rejected the tokens of one request (llama.h: llama_decode, llama_encode).

    Other requests are not affected.
    """

    code = "decode_failed"


class RequestFailed(EngineError):
    """An unexpected error ended this request. The error is logged, and other requests continue."""

    code = "internal_error"


class GrammarFailed(EngineError):
    """The grammar, the logit biases and `ignore_eos` together don't allow any token."""

    code = "grammar_failed"


class EmbeddingCancelled(EngineError):
    """An embedding request was cancelled.

    Cancelled generation requests don't raise this error. They finish with the reason `cancelled` instead.
    """

    code = "cancelled"


class EngineStopped(EngineError):
    """The engine was closed or its thread failed, so the engine no longer accepts requests."""

    code = "engine_stopped"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name.

    The text suggests the most similar known name, or lists all known names if none is similar.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names) or 'none'}"


def check(ok: bool, name: str, value: object, condition: str) -> None:
    """Raise InvalidRequest unless `ok` is true.

    The message contains the name, the value, and the condition that the value must meet.
    """
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
