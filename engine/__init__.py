"""The inference engine, which runs continuous batching on llama.cpp.

The engine also works as a library, without Celery or Redis.
"""

from .backend import ModelInfo
from .core.adapters import AdapterInfo
from .core.embedder import Embedder, EmbeddingHandle, Reranker, scores_of
from .core.engine import Engine
from .core.requests import Handle
from .core.telemetry import StepCounts
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
    ModelNotLoaded as UnknownModel,
    PromptTooLong,
    QueueFull,
    RequestFailed,
    TemplateFailed,
    UnknownAdapter,
    UnknownKey,
    WrongCapability,
)
from .events import (
    Completion,
    Context,
    Event,
    Finished,
    PrefixHit as CacheHit,
    RequestStats,
    RequestTimings as Timings,
    RequestUsage as Usage,
    Started,
    StepStats,
    Text,
)
from .memory.budget import Device, Footprint, Vram
from .models.manager import ModelEntry, ModelManager
from .models.memory_admission import devices, vram_info
from .models.model import Model, Tokenizer, wanted_text
from .models.sources import HubOptions
from .options import EngineOptions
from .request import Request, Resumed, SamplingParams, Share, TokenLogprob, sampling_of
from .sampling.processors import LogitsProcessor, SequenceStart
from .snapshots import EmbedderSnapshot, EngineSnapshot, ManagerSnapshot, ModelSnapshot
from .system.core_sharing import CoreSharing, Peer
from .system.threads import STACK_BYTES
from .system.watchdog import Pulse, Watchdog
from .text.chat_options import ChatOptions, ChatPrompt
from .text.chat_template import Message
from .text.formats.calls import CallDelta as ToolCallDelta, ParsedToolCall as ToolCall
from .text.reply_reader import ReplyFormat

__all__ = [
    "STACK_BYTES",
    "AdapterBusy",
    "AdapterInfo",
    "AdapterLoadFailed",
    "CacheHit",
    "ChatOptions",
    "ChatPrompt",
    "Completion",
    "Context",
    "CoreSharing",
    "DecodeFailed",
    "Device",
    "Embedder",
    "EmbedderSnapshot",
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
    "LogitsProcessor",
    "ManagerExists",
    "ManagerSnapshot",
    "Message",
    "Model",
    "ModelBusy",
    "ModelEntry",
    "ModelInfo",
    "ModelLoadFailed",
    "ModelManager",
    "ModelSnapshot",
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
    "SequenceStart",
    "Share",
    "Started",
    "StepCounts",
    "StepStats",
    "TemplateFailed",
    "Text",
    "Timings",
    "TokenLogprob",
    "Tokenizer",
    "ToolCall",
    "ToolCallDelta",
    "UnknownAdapter",
    "UnknownKey",
    "UnknownModel",
    "Usage",
    "Vram",
    "Watchdog",
    "WrongCapability",
    "devices",
    "sampling_of",
    "scores_of",
    "vram_info",
    "wanted_text",
]
