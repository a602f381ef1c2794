"""The Celery tasks of cellama. Importing this needs neither llama.cpp nor a running Redis.

from cellama.tasks import generate
generate.delay("tiny", "Once upon a time", max_tokens=64).get(timeout=60)["text"]
"""

from .app import app
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
from .jobs import apply_chat_template, chat, detokenize, embed, generate, rerank, tokenize

__all__ = [
    "InvalidJob",
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
    "app",
    "apply_chat_template",
    "chat",
    "detokenize",
    "embed",
    "generate",
    "rerank",
    "tokenize",
]
