"""For producers and people: the client in Python, the command line, a Redis for this machine.

from cellama.api import Client
job = Client().generate("tiny", "Once upon a time")
for event in job.stream(): ...
"""

from importlib.metadata import version

from cellama.config.model_options import ModelOptions
from cellama.tasks import (
    AdapterView,
    AssistantMessage,
    ChatMessage,
    ChatParams,
    ChatResult,
    DetokenizeParams,
    DetokenizeResult,
    DoneEvent,
    EmbedParams,
    EmbedResult,
    EngineState,
    ErrorEvent,
    Event,
    GenerateParams,
    GenerateResult,
    InvalidJob,
    JobCancelled,
    JobError,
    JobFailed,
    JobTimeout,
    LineEvent,
    MemoryView,
    ModelView,
    PingEvent,
    ReasoningEndEvent,
    ReasoningEvent,
    RedisFull,
    RedisRefused,
    RedisUnreachable,
    RerankParams,
    RerankResult,
    Result,
    ResultIgnored,
    StartedEvent,
    StreamTrimmed,
    TemplateParams,
    TemplateResult,
    Timings,
    TokenEvent,
    TokenizeParams,
    TokenizeResult,
    Tool,
    ToolCall,
    UnknownJob,
    UnknownModel,
    UnknownWorker,
    Usage,
    WorkerAdapter,
    WorkerCores,
    WorkerMemory,
    WorkerModel,
)
from cellama.tasks.state.job_list import OpenJob
from cellama.tasks.state.position import Position
from cellama.tasks.state.records import DeadJob
from cellama.tasks.state.registry import WorkerEntry

from .batch.options import BatchParams, Summary
from .batch.progress import Progress
from .client.async_client import AsyncClient, AsyncJob
from .client.client import Client
from .client.job import Job
from .client.registry_views import Stats

__version__ = version("cellama")

__all__ = [
    "AdapterView",
    "AssistantMessage",
    "AsyncClient",
    "AsyncJob",
    "BatchParams",
    "ChatMessage",
    "ChatParams",
    "ChatResult",
    "Client",
    "DeadJob",
    "DetokenizeParams",
    "DetokenizeResult",
    "DoneEvent",
    "EmbedParams",
    "EmbedResult",
    "EngineState",
    "ErrorEvent",
    "Event",
    "GenerateParams",
    "GenerateResult",
    "InvalidJob",
    "Job",
    "JobCancelled",
    "JobError",
    "JobFailed",
    "JobTimeout",
    "LineEvent",
    "MemoryView",
    "ModelOptions",
    "ModelView",
    "OpenJob",
    "PingEvent",
    "Position",
    "Progress",
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
    "Stats",
    "StreamTrimmed",
    "Summary",
    "TemplateParams",
    "TemplateResult",
    "Timings",
    "TokenEvent",
    "TokenizeParams",
    "TokenizeResult",
    "Tool",
    "ToolCall",
    "UnknownJob",
    "UnknownModel",
    "UnknownWorker",
    "Usage",
    "WorkerAdapter",
    "WorkerCores",
    "WorkerEntry",
    "WorkerMemory",
    "WorkerModel",
    "__version__",
]
