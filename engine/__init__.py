"""The inference engine: continuous batching on llama.cpp, usable as a library without Celery and Redis."""

from .backend import ModelInfo
from .embedder import Embedder, EmbeddingHandle
from .engine import Engine
from .errors import (
    DecodeFailed,
    EmbeddingCancelled,
    EngineError,
    EngineStopped,
    GrammarFailed,
    InvalidRequest,
    ModelLoadFailed,
    PromptTooLong,
    QueueFull,
    TemplateFailed,
    UnknownModel,
    WrongCapability,
)
from .events import (
    Completion,
    EngineSnapshot,
    Event,
    Finished,
    RequestStats,
    Started,
    StepStats,
    Text,
    Timings,
    Usage,
)
from .handle import Handle
from .logprobs import TokenLogprob
from .models import Model, ModelManager
from .params import EngineOptions, Request, Resumed, SamplingParams

__all__ = [
    "Completion",
    "DecodeFailed",
    "Embedder",
    "EmbeddingCancelled",
    "EmbeddingHandle",
    "Engine",
    "EngineError",
    "EngineOptions",
    "EngineSnapshot",
    "EngineStopped",
    "Event",
    "Finished",
    "GrammarFailed",
    "Handle",
    "InvalidRequest",
    "Model",
    "ModelInfo",
    "ModelLoadFailed",
    "ModelManager",
    "PromptTooLong",
    "QueueFull",
    "Request",
    "RequestStats",
    "Resumed",
    "SamplingParams",
    "Started",
    "StepStats",
    "TemplateFailed",
    "Text",
    "Timings",
    "TokenLogprob",
    "UnknownModel",
    "Usage",
    "WrongCapability",
]
