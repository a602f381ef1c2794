"""The Python client, the command line, the gateway, and an embedded Redis server.

from cellama.api import Client
job = Client().generate("tiny", "Once upon a time")
for event in job.stream(): ...
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from cellama.config.model_options import ModelOptions
from cellama.tasks import (
    AdapterView,
    AssistantMessage,
    CachedPrefix,
    CacheHit,
    ChatMessage,
    DoneEvent,
    EmbedderState,
    EngineState,
    ErrorEvent,
    Event,
    InvalidJob,
    JobCancelled,
    JobError,
    JobFailed,
    JobTimeout,
    LimitReached,
    LineEvent,
    MemoryView,
    ModelView,
    PingEvent,
    ReasoningEndEvent,
    ReasoningEvent,
    RedisFull,
    RedisRefused,
    RedisUnreachable,
    Result,
    ResultIgnored,
    StartedEvent,
    StreamTrimmed,
    Timings,
    TokenEvent,
    Tool,
    ToolCall,
    Totals,
    UnknownJob,
    UnknownModel,
    UnknownWorker,
    Usage,
    WantedThing,
    WorkerAdapter,
    WorkerCores,
    WorkerMemory,
    WorkerModel,
)
from cellama.tasks.estimates.position import Position
from cellama.tasks.state.ledger import DeadJob
from cellama.tasks.state.registry import WorkerEntry
from cellama.tasks.state.tenants import TenantShare
from cellama.tasks.typed_tasks import (
    ChatParams,
    ChatResult,
    DetokenizeParams,
    DetokenizeResult,
    EmbedParams,
    EmbedResult,
    GenerateParams,
    GenerateResult,
    PrefillParams,
    PrefillResult,
    RerankParams,
    RerankResult,
    TemplateParams,
    TemplateResult,
    TokenizeParams,
    TokenizeResult,
)

from .batch.options import BatchParams, Progress, Summary

if TYPE_CHECKING:
    from cellama.tasks.state.job_list import OpenJob

    from .client.async_client import AsyncClient, AsyncJob
    from .client.client import Client, Job
    from .client.registry_views import Stats

    __version__: str

# Names that are imported when they are first used, because `cellama batch run` starts faster without their modules.
_LATE = {
    "AsyncClient": "cellama.api.client.async_client",
    "AsyncJob": "cellama.api.client.async_client",
    "Client": "cellama.api.client.client",
    "Job": "cellama.api.client.client",
    "OpenJob": "cellama.tasks.state.job_list",
    "Stats": "cellama.api.client.registry_views",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("cellama")
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATE[name]), name)
    return value


__all__ = [
    "AdapterView",
    "AssistantMessage",
    "AsyncClient",
    "AsyncJob",
    "BatchParams",
    "CacheHit",
    "CachedPrefix",
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
    "EmbedderState",
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
    "LimitReached",
    "LineEvent",
    "MemoryView",
    "ModelOptions",
    "ModelView",
    "OpenJob",
    "PingEvent",
    "Position",
    "PrefillParams",
    "PrefillResult",
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
    "TenantShare",
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
    "WorkerEntry",
    "WorkerMemory",
    "WorkerModel",
    "__version__",
]
