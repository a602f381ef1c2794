"""What can go wrong in the engine, and what it means outside.

    EngineError
    ├── InvalidRequest          a parameter or a text is wrong
    │   └── PromptTooLong       the prompt can never fit
    ├── TemplateFailed          the chat template refused the messages, or there is none
    ├── WrongCapability         the model is not loaded for this use
    ├── ModelNotLoaded            no model of that id
    ├── ModelLoadFailed         source missing, damaged or not supported
    │   ├── IdTaken             another model has the id
    │   └── InsufficientMemory  the model does not fit into the memory budget
    ├── AdapterLoadFailed       file missing, damaged, no LoRA adapter, or made for another model
    ├── UnknownAdapter          the model has no adapter of that name
    ├── UnknownKey              no context of that key for whoever asks
    ├── AdapterBusy             the adapter is in use and can't be unloaded now
    ├── ManagerExists           this process has a model manager already
    ├── ModelBusy               the model is in use and can't be unloaded now
    ├── QueueFull               the engine's waiting queue is at its limit
    ├── DecodeFailed            llama.cpp refused this request's tokens
    ├── RequestFailed           something unforeseen went wrong for this request
    ├── GrammarFailed           grammar, biases and ignore_eos together allow no token
    ├── EmbeddingCancelled      an embedding was cancelled (a generation ends as `cancelled` instead)
    └── EngineStopped           the engine closed, or its thread died

Codes cross processes, objects don't. What a code means for callers is in one table (`tasks/contract/codes.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class EngineError(Exception):
    """The engine could not do what was asked; `str(error)` is written for people."""

    code: ClassVar[str] = "engine_error"


class InvalidRequest(EngineError):
    """A parameter or a text is wrong; the message names it, its value and what would do."""

    code = "invalid_request"


class PromptTooLong(InvalidRequest):
    """The prompt can never fit into a slot's context."""

    code = "prompt_too_long"


class TemplateFailed(EngineError):
    """The chat template refused the messages, took too long, or there is none."""

    code = "template_failed"


class WrongCapability(EngineError):
    """The model is not loaded for this use."""

    code = "wrong_capability"


class ModelNotLoaded(EngineError):
    """There is no model of that id."""

    code = "unknown_model"


class ModelLoadFailed(EngineError):
    """The source is missing, damaged or not supported; nothing of it stays in memory."""

    code = "model_load_failed"


class IdTaken(ModelLoadFailed):
    """Another model, or another adapter of the model, has the id."""

    code = "id_taken"


class InsufficientMemory(ModelLoadFailed):
    """Nothing was allocated. The attributes say where, how much was wanted and how much there was."""

    code = "insufficient_memory"

    def __init__(self, message: str, device: str, required_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.device = device
        self.required_bytes = required_bytes
        self.available_bytes = available_bytes


class AdapterLoadFailed(EngineError):
    """The file is missing, damaged, no LoRA adapter, or made for another model."""

    code = "adapter_load_failed"


class UnknownAdapter(EngineError):
    """The model has no adapter of that name."""

    code = "unknown_adapter"


class UnknownKey(EngineError):
    """No context of that key is known here, for these adapters and this scope."""

    code = "unknown_key"


class AdapterBusy(EngineError):
    """Requests still have the adapter when the time is over; it serves on."""

    code = "adapter_busy"


class ManagerExists(EngineError):
    """This process has an open ModelManager already."""

    code = "manager_exists"


class ModelBusy(EngineError):
    """The model is still in use when the time is over; it serves on."""

    code = "model_busy"


class QueueFull(EngineError):
    """`max_queue` requests wait already; it comes through the handle."""

    code = "queue_full"


class DecodeFailed(EngineError):
    """llama.cpp refused the tokens of this request (llama.h: llama_decode, llama_encode); others go on."""

    code = "decode_failed"


class RequestFailed(EngineError):
    """Something unforeseen went wrong for this request; the log has it, and others go on."""

    code = "internal_error"


class GrammarFailed(EngineError):
    """Grammar, biases and ignore_eos together allow no token."""

    code = "grammar_failed"


class EmbeddingCancelled(EngineError):
    """An embedding was cancelled; a generation ends with the finish reason `cancelled` instead."""

    code = "cancelled"


class EngineStopped(EngineError):
    """The engine closed, or its thread died; it takes no more requests."""

    code = "engine_stopped"


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names) or 'none'}"
