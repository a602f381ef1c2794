"""The Celery tasks of cellama. Importing this needs neither llama.cpp nor a running Redis.

from cellama.tasks import generate
generate.delay("tiny", "Once upon a time", max_tokens=64).get(timeout=60)["text"]
"""

from . import jobs
from .app import app
from .calls.task_types import (
    CallOptions,
    ChatTask,
    DetokenizeTask,
    EmbedTask,
    GenerateTask,
    QueuedJob,
    RerankTask,
    TemplateTask,
    TokenizeTask,
)
from .contract.errors import (
    InvalidJob,
    JobCancelled,
    JobError,
    JobFailed,
    JobTimeout,
    RedisFull,
    RedisRefused,
    RedisUnreachable,
    ResultIgnored,
    StreamTrimmed,
    UnknownJob,
    UnknownModel,
    UnknownWorker,
)
from .contract.events import (
    DoneEvent,
    ErrorEvent,
    Event,
    LineEvent,
    PingEvent,
    ReasoningEndEvent,
    ReasoningEvent,
    StartedEvent,
    TokenEvent,
)
from .contract.shapes.parameters import (
    ChatMessage,
    ChatParams,
    DetokenizeParams,
    EmbedParams,
    GenerateParams,
    RerankParams,
    TemplateParams,
    TokenizeParams,
    Tool,
)
from .contract.shapes.results import (
    AssistantMessage,
    ChatResult,
    DetokenizeResult,
    EmbedResult,
    GenerateResult,
    RerankResult,
    Result,
    TemplateResult,
    Timings,
    TokenizeResult,
    ToolCall,
    Usage,
)
from .contract.shapes.workers import (
    AdapterView,
    EmbedderState,
    EngineState,
    MemoryView,
    ModelView,
    Totals,
    WantedThing,
    WorkerAdapter,
    WorkerCores,
    WorkerMemory,
    WorkerModel,
)

generate: GenerateTask = jobs.generate
chat: ChatTask = jobs.chat
embed: EmbedTask = jobs.embed
rerank: RerankTask = jobs.rerank
tokenize: TokenizeTask = jobs.tokenize
detokenize: DetokenizeTask = jobs.detokenize
apply_chat_template: TemplateTask = jobs.apply_chat_template

__all__ = [
    "AdapterView",
    "AssistantMessage",
    "CallOptions",
    "ChatMessage",
    "ChatParams",
    "ChatResult",
    "DetokenizeParams",
    "DetokenizeResult",
    "DoneEvent",
    "EmbedParams",
    "EmbedResult",
    "EmbedderState",
    "EngineState",
    "ErrorEvent",
    "Event",
    "GenerateParams",
    "GenerateResult",
    "InvalidJob",
    "JobCancelled",
    "JobError",
    "JobFailed",
    "JobTimeout",
    "LineEvent",
    "MemoryView",
    "ModelView",
    "PingEvent",
    "QueuedJob",
    "ReasoningEndEvent",
    "ReasoningEvent",
    "RedisFull",
    "RedisRefused",
    "RedisUnreachable",
    "RerankParams",
    "RerankResult",
    "Result",
    "ResultIgnored",
    "StartedEvent",
    "StreamTrimmed",
    "TemplateParams",
    "TemplateResult",
    "Timings",
    "TokenEvent",
    "TokenizeParams",
    "TokenizeResult",
    "Tool",
    "ToolCall",
    "Totals",
    "UnknownJob",
    "UnknownModel",
    "UnknownWorker",
    "Usage",
    "WantedThing",
    "WorkerAdapter",
    "WorkerCores",
    "WorkerMemory",
    "WorkerModel",
    "app",
    "apply_chat_template",
    "chat",
    "detokenize",
    "embed",
    "generate",
    "rerank",
    "tokenize",
]
