"""The inference engine: continuous batching on llama.cpp, usable as a library without Celery and Redis."""

from .backend import ModelInfo
from .budget import Device, Footprint
from .embedder import Embedder, EmbeddingHandle
from .engine import Engine
from .errors import (
    DecodeFailed,
    EmbeddingCancelled,
    EngineError,
    EngineStopped,
    GrammarFailed,
    IdTaken,
    InsufficientMemory,
    InvalidRequest,
    ManagerExists,
    ModelBusy,
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
from .hub import HubOptions
from .logprobs import TokenLogprob
from .manager import ModelEntry, ModelManager, devices
from .models import Model
from .params import EngineOptions, Request, Resumed, SamplingParams
from .texts import Tokenizer

__all__ = [
    "Completion",
    "DecodeFailed",
    "Device",
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
    "Footprint",
    "GrammarFailed",
    "Handle",
    "HubOptions",
    "IdTaken",
    "InsufficientMemory",
    "InvalidRequest",
    "ManagerExists",
    "Model",
    "ModelBusy",
    "ModelEntry",
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
    "Tokenizer",
    "UnknownModel",
    "Usage",
    "WrongCapability",
    "devices",
]
