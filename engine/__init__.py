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
    TokenLogprob,
    Usage,
)
from .handle import Handle
from .models import Model, ModelManager
from .params import EngineOptions, Request, SamplingParams

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
