"""The Celery application. Reading the settings is put off until something needs them."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from celery import Celery
from kombu import Queue

from cellama.config import ModelSettings, Settings, get_settings
from cellama.config.settings import DEFAULT_SLOTS

from .contract.keys import UNACKED_INDEX_KEY, UNACKED_KEY, UNACKED_MUTEX_KEY
from .contract.names import DEFAULT_MODEL, PRIORITIES, PRIORITY_SEPARATOR, queue_name

if TYPE_CHECKING:
    from .runtime import Runtime

CONNECT_TIMEOUT_S = 5
_CERTIFICATE_CHECKS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
EMBEDDING_JOBS = 16  # of a model that only embeds or reranks: they fill its batches
EMBEDDING_JOBS_BESIDE = 4  # of one that generates, too: jobs of both kinds take them, so more would wait here


class CellamaApp(Celery):  # type: ignore[misc]
    """A Celery app that, inside a worker, holds what the worker runs on."""

    control_cls = "cellama.tasks.control:LastingControl"
    runtime: Runtime | None = None  # set by the worker's lifecycle


def make_app() -> CellamaApp:
    """An app of its own: a web backend's current app stays what it is."""
    from . import lifecycle

    new = CellamaApp("cellama", set_as_current=False, include=["cellama.tasks.jobs"])
    new.add_defaults(lambda: celery_config(get_settings()))
    lifecycle.install(new)
    return new


def celery_config(settings: Settings) -> dict[str, Any]:
    """Celery's configuration from our settings (docs/architecture.md says why where it is not plain)."""
    redis = {"socket_timeout": 30, "socket_connect_timeout": CONNECT_TIMEOUT_S, "socket_keepalive": True}
    return {
        "broker_url": settings.redis_url,
        "result_backend": f"cellama.tasks.result_backend:ResultBackend+{settings.redis_url}",
        "result_expires": settings.result_ttl_s,
        "result_backend_always_retry": True,
        "result_backend_thread_safe": True,
        "result_backend_transport_options": {"retry_policy": {"timeout": 5.0}},
        **{f"redis_{name}": value for name, value in redis.items()},
        **{name: tls_options(settings.redis_url) for name in ("broker_use_ssl", "redis_backend_use_ssl")},
        "broker_transport_options": {
            **redis,
            "health_check_interval": 10,
            "visibility_timeout": settings.lease_s,  # renewed by every worker that lives: tasks/lease.py
            "unacked_key": UNACKED_KEY,
            "unacked_index_key": UNACKED_INDEX_KEY,
            "unacked_mutex_key": UNACKED_MUTEX_KEY,
            "unacked_restore_interval": max(1, settings.lease_s // 4),  # seconds between two looks for ended leases
            "unacked_restore_throttle": 1,
            "unacked_restore_limit": None,  # all at once
            "unacked_mutex_expire": 30,
            "priority_steps": list(PRIORITIES),
            "sep": PRIORITY_SEPARATOR,
            "queue_order_strategy": "round_robin",  # within the limits of tasks/channels.py
        },
        "broker_connection_timeout": CONNECT_TIMEOUT_S,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "task_serializer": "json",
        "result_serializer": "json",
        "accept_content": ["json"],
        "task_queues": [Queue(queue_name(model)) for model in (*_model_ids(settings), DEFAULT_MODEL)],
        "task_default_queue": "celery",  # of tasks that are not ours: what follows a job in a user's canvas
        "task_acks_late": True,
        "task_track_started": True,
        "task_send_sent_event": True,
        "worker_pool": "cellama.tasks.pool:TaskPool",
        "worker_consumer": "cellama.tasks.consumer:SteadyConsumer",
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_enable_prefetch_count_reduction": False,
        "worker_concurrency": concurrency(settings),
        "worker_prefetch_multiplier": 1,
        "worker_deduplicate_successful_tasks": True,
        "worker_send_task_events": True,
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
    }


def tls_options(url: str) -> dict[str, Any] | None:
    """What Celery must be told for a rediss:// URL; by itself it would not check the server's certificate."""
    parts = urlsplit(url)
    if parts.scheme != "rediss":
        return None
    given = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    checks = given.get("ssl_cert_reqs", "required").lower().removeprefix("cert_")
    options: dict[str, Any] = {"ssl_cert_reqs": _CERTIFICATE_CHECKS[checks]}
    return options | {name: given[name] for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile") if name in given}


def _model_ids(settings: Settings) -> list[str]:
    return [model.id for model in settings.models]


def concurrency(settings: Settings) -> int:
    """Jobs that a worker holds at once: those of its models, and the look-ahead.

    Once they are loaded, it is corrected for those whose number of slots was tuned (Runtime.attach).
    """
    return sum(num_jobs_of(model) + settings.look_ahead for model in settings.models)


def num_jobs_of(model: ModelSettings, slots: int | None = None) -> int:
    """Jobs that a model works on at once: one per slot, and some for embeddings and reranking.

    `slots` are those of the loaded model; without them it is what the settings say, or the default.
    One that gets its capabilities from its file counts as if it could do everything.
    """
    able = set(model.capabilities or ("generate", "embed"))
    reads = bool({"embed", "rerank"} & able)
    if not {"generate", "chat"} & able:
        return EMBEDDING_JOBS * reads
    return (slots or model.n_parallel or DEFAULT_SLOTS) + EMBEDDING_JOBS_BESIDE * reads


app = make_app()
