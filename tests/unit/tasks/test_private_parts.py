"""The private parts of Celery, kombu and redis-py that we build on. One that is gone or changed is named here first.

Versions are bounded in pyproject.toml; whoever raises a bound reads the sources of what fails.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu.utils.imports import symbol_by_name

TASKS = Path(__file__).parents[3] / "tasks"
ATTRIBUTE = "an attribute"

# file of ours → the parts it uses, with their signatures
PARTS: dict[str, dict[str, str]] = {
    "broker/channels.py": {
        "kombu.transport.redis:Channel._brpop_start": "(self, timeout=None)",
        "kombu.transport.redis:Channel._brpop_sent_at": ATTRIBUTE,
        "kombu.transport.redis:Channel._create_client": "(self, asynchronous=False)",
        "kombu.transport.redis:Channel._in_poll": ATTRIBUTE,
        "kombu.transport.redis:Channel._queue_cycle": ATTRIBUTE,
        "redis.connection:AbstractConnection._sock": ATTRIBUTE,
    },
    "broker/consumer.py": {
        "celery.worker.consumer:Consumer._flush_events": "(self)",
        "kombu.connection:Connection._default_channel": ATTRIBUTE,
        "kombu.transport.redis:Channel._brpop_read": "(self, **options)",
        "kombu.transport.redis:Channel._in_poll": ATTRIBUTE,
        "kombu.transport.virtual:Channel._qos": ATTRIBUTE,
    },
    "broker/control.py": {"kombu.transport.redis:Channel._purge": "(self, queue)"},
    "calls/enqueue.py": {
        "kombu.messaging:Producer._publish": (
            "(self, body, priority, content_type, content_encoding, headers, properties, routing_key, mandatory, "
            "immediate, exchange, declare, timeout=None, confirm_timeout=None, retry=False, retry_policy=None)"
        ),
    },
    "broker/holding.py": {
        **{f"kombu.transport.virtual:QoS.{name}": ATTRIBUTE for name in ("_delivered", "_dirty", "_quick_ack")},
    },
    "broker/pool.py": {
        "celery.concurrency.base:BasePool._get_info": "(self) -> Dict[str, Any]",
        "celery.concurrency.prefork:_run_ready_callbacks": "(hub)",
    },
    "broker/message.py": {f"celery.worker.request:Request.{name}": ATTRIBUTE for name in ("_apply_result", "_message")},
    "worker/model_loading.py": {"celery.worker.consumer:Consumer._update_prefetch_count": "(self, index=0)"},
    "broker/result_backend.py": {
        "celery.backends.redis:RedisBackend._MAX_STR_VALUE_SIZE": ATTRIBUTE,
        "celery.backends.redis:RedisBackend._get_result_meta": (
            "(self, result, state, traceback, request, format_date=True, encode=False)"
        ),
        "celery.backends.redis:RedisBackend._store_result": (
            "(self, task_id, result, state, traceback=None, request=None, **kwargs)"
        ),
    },
    "calls/canvas_steps.py": {
        "celery._state:_get_active_apps": "()",
        "celery.app.amqp:AMQP._retry_publish": "(self, publish, *args, **kwargs)",
        "celery.app.amqp:_callback_publish_retry": ATTRIBUTE,
        "celery.app.base:Celery._tasks": ATTRIBUTE,
    },
    "jobs.py": {"celery.app.base:Celery._tasks": ATTRIBUTE},
}

# What we override, or call in the way Celery does, without an underscore.
OVERRIDDEN = {
    "celery.app.base:Celery.connection_for_write": "(self, url=None, **kwargs)",
    "celery.app.task:Task.apply": (
        "(self, args=None, kwargs=None, link=None, link_error=None, task_id=None, retries=None, throw=None, "
        "logfile=None, loglevel=None, headers=None, **options)"
    ),
    "celery.app.task:Task.signature": "(self, args=None, *starargs, **starkwargs)",
    "celery.concurrency.base:apply_target": "(target, args=(), kwargs=None, callback=None, accept_callback=None, pid=",
    "celery.worker.consumer:Consumer.call_soon_ack": "(self, p, *args, **kwargs)",
    "celery.worker.consumer:Consumer.on_connection_error_after_connected": "(self, exc)",
    "celery.worker.control:revoke": "(state, task_id, terminate=False, signal=None, **kwargs)",
    "celery.worker.request:Request.maybe_expire": "(self)",
    "celery.worker.strategy:default": "(task, app, consumer, ",
    "kombu.transport.redis:Channel._put": "(self, queue, message, **kwargs)",
    "kombu.transport.redis:QoS.can_consume": "(self)",
    "kombu.transport.virtual:QoS.ack": "(self, delivery_tag)",
    "kombu.transport.redis:QoS.restore_unacked": "(self, client=None)",
    "kombu.transport.redis:QoS.restore_visible": "(self, start=0, num=10, interval=10)",
    "kombu.transport.virtual:QoS.append": "(self, message, delivery_tag)",
    "kombu.transport.virtual:QoS.reject": "(self, delivery_tag, requeue=False)",
}


def find(path: str) -> tuple[Any, str]:
    module, _, names = path.partition(":")
    *owners, name = names.split(".")
    owner = symbol_by_name(f"{module}:{owners[0]}") if owners else __import__(module, fromlist=["_"])
    return owner, name


@pytest.mark.parametrize(
    ("path", "expected", "user"),
    [(path, expected, file) for file, parts in PARTS.items() for path, expected in parts.items()]
    + [(path, expected, "see docs/architecture.md") for path, expected in OVERRIDDEN.items()],
)
def test_part_is_there_as_we_know_it(path: str, expected: str, user: str) -> None:
    owner, name = find(path)
    if expected is not ATTRIBUTE:
        assert str(inspect.signature(getattr(owner, name))).startswith(expected), f"tasks/{user} builds on it"
    elif not hasattr(owner, name):
        sources = [inspect.getsource(kind) for kind in owner.__mro__ if kind is not object]
        assert any(f"self.{name}" in source for source in sources), f"tasks/{user} builds on it"


def mentioned(node: ast.AST) -> Iterator[str]:
    """Names that are read or set somewhere below as attributes, or imported."""
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute):
            yield child.attr
        elif isinstance(child, ast.ImportFrom) and child.level == 0:
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id == "getattr":
            yield from (arg.value for arg in child.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def defined(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            if isinstance(child.value, ast.Name) and child.value.id in ("self", "cls"):
                yield child.attr
        elif isinstance(child, ast.AnnAssign | ast.Assign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


@pytest.mark.parametrize("file", sorted(str(path.relative_to(TASKS)) for path in TASKS.rglob("*.py")))
def test_every_private_part_that_a_module_uses_is_listed(file: str) -> None:
    tree = ast.parse((TASKS / file).read_text())
    known = {path.rpartition(".")[2].rpartition(":")[2] for path in PARTS.get(file, {})}
    names = {name for name in mentioned(tree) if name.startswith("_") and not name.startswith("__")}
    own = set(defined(tree))
    assert names - own <= known, f"{file} uses what no table lists: {names - own - known}"
    assert known <= names | own, f"{file} uses no more: {known - names - own}"
