"""The inference engine: continuous batching on llama.cpp, usable as a library without Celery and Redis."""

from .adapters import AdapterInfo
from .backend import ModelInfo
from .budget import Device, Footprint
from .chat import ChatOptions, ChatPrompt, Message
from .cores import Peer
from .embedder import Embedder, EmbeddingHandle
from .engine import Engine
from .errors import (
    AdapterBusy,
    AdapterLoadFailed,
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
    RequestFailed,
    TemplateFailed,
    UnknownAdapter,
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
from .reply import ReplyFormat
from .reranker import Reranker, scores_of
from .sharing import CoreSharing
from .texts import Tokenizer
from .threads import STACK_BYTES
from .tool_calls import ToolCall
from .watchdog import Pulse, Watchdog

__all__ = [
    "STACK_BYTES",
    "AdapterBusy",
    "AdapterInfo",
    "AdapterLoadFailed",
    "ChatOptions",
    "ChatPrompt",
    "Completion",
    "CoreSharing",
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
    "Message",
    "Model",
    "ModelBusy",
    "ModelEntry",
    "ModelInfo",
    "ModelLoadFailed",
    "ModelManager",
    "Peer",
    "PromptTooLong",
    "Pulse",
    "QueueFull",
    "ReplyFormat",
    "Request",
    "RequestFailed",
    "RequestStats",
    "Reranker",
    "Resumed",
    "SamplingParams",
    "Started",
    "StepStats",
    "TemplateFailed",
    "Text",
    "Timings",
    "TokenLogprob",
    "Tokenizer",
    "ToolCall",
    "UnknownAdapter",
    "UnknownModel",
    "Usage",
    "Watchdog",
    "WrongCapability",
    "devices",
    "scores_of",
]
