"""For producers and people: the client in Python, the command line, a Redis for this machine.

from cellama.api import Client
job = Client().generate("tiny", "Once upon a time")
for event in job.stream(): ...
"""

from importlib.metadata import version

from cellama.tasks import (
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

from .client.async_client import AsyncClient, AsyncJob
from .client.client import Client, Job

__version__ = version("cellama")

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "Client",
    "InvalidJob",
    "Job",
    "JobCancelled",
    "JobError",
    "JobFailed",
    "JobTimeout",
    "RedisFull",
    "RedisRefused",
    "RedisUnreachable",
    "ResultIgnored",
    "StreamTrimmed",
    "UnknownJob",
    "UnknownModel",
    "UnknownWorker",
    "__version__",
]
