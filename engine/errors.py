"""What can go wrong in the engine, and what it means outside.

    EngineError
    ├── InvalidRequest          a parameter or a text is wrong
    │   └── PromptTooLong       the prompt can never fit
    ├── TemplateFailed          the chat template refused the messages, or there is none
    ├── WrongCapability         the model is not loaded for this use
    ├── UnknownModel            no model of that id
    ├── ModelLoadFailed         source missing, damaged or not supported
    │   ├── IdTaken             another model has the id
    │   └── InsufficientMemory  the model does not fit into the memory budget
    ├── AdapterLoadFailed       file missing, damaged, no LoRA adapter, or made for another model
    ├── UnknownAdapter          the model has no adapter of that name
    ├── AdapterBusy             the adapter is in use and can't be unloaded now
    ├── ManagerExists           this process has a model manager already
    ├── ModelBusy               the model is in use and can't be unloaded now
    ├── QueueFull               the engine's waiting line is at its limit
    ├── DecodeFailed            llama.cpp refused this request's tokens
    ├── RequestFailed           something that nobody foresaw went wrong for this request
    ├── GrammarFailed           grammar, biases and ignore_eos together allow no token
    ├── EmbeddingCancelled      somebody cancelled an embedding (a generation ends as `cancelled` instead)
    └── EngineStopped           the engine closed, or its thread died

The class attributes are the one table error → code, retryable, HTTP status; codes cross processes, objects don't.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class EngineError(Exception):
    """The engine could not do what was asked; `str(error)` is written for people."""

    code: ClassVar[str] = "engine_error"
    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500


class InvalidRequest(EngineError):
    code = "invalid_request"
    http_status = 400


class PromptTooLong(InvalidRequest):
    code = "prompt_too_long"


class TemplateFailed(EngineError):
    code = "template_failed"
    http_status = 400


class WrongCapability(EngineError):
    code = "wrong_capability"
    http_status = 400


class UnknownModel(EngineError):
    code = "unknown_model"
    http_status = 404


class ModelLoadFailed(EngineError):
    code = "model_load_failed"


class IdTaken(ModelLoadFailed):
    code = "id_taken"
    http_status = 409


class InsufficientMemory(ModelLoadFailed):
    """Nothing was allocated. The attributes say where, how much was wanted and how much there was."""

    code = "insufficient_memory"
    http_status = 507

    def __init__(self, message: str, device: str, required_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.device = device
        self.required_bytes = required_bytes
        self.available_bytes = available_bytes


class AdapterLoadFailed(EngineError):
    code = "adapter_load_failed"


class UnknownAdapter(EngineError):
    code = "unknown_adapter"
    http_status = 404


class AdapterBusy(EngineError):
    code = "adapter_busy"
    retryable = True
    http_status = 409


class ManagerExists(EngineError):
    code = "manager_exists"


class ModelBusy(EngineError):
    code = "model_busy"
    retryable = True
    http_status = 409


class QueueFull(EngineError):
    code = "queue_full"
    retryable = True
    http_status = 429


class DecodeFailed(EngineError):
    code = "decode_failed"
    retryable = True


class RequestFailed(EngineError):
    code = "internal_error"


class GrammarFailed(EngineError):
    code = "grammar_failed"
    http_status = 400


class EmbeddingCancelled(EngineError):
    code = "cancelled"
    http_status = 499


class EngineStopped(EngineError):
    code = "engine_stopped"
    retryable = True
    http_status = 503


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names) or 'none'}"
