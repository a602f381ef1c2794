"""What all tasks have in common for type checkers, because Celery has no types of its own.

The types of each task are in `tasks/typed_tasks.py`; signatures and groups stay Celery's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Literal, Protocol, TypeVar, Unpack, overload

from celery.canvas import Signature, group
from typing_extensions import TypedDict

R = TypeVar("R", covariant=True)
C = TypeVar("C", contravariant=True)


class QueuedJob(Protocol[R]):
    """A job that was queued: Celery's AsyncResult of it. Its `id` is what `Client.job` and `cellama jobs` take."""

    id: str

    @property
    def state(self) -> str:
        """PENDING until it has ended, then SUCCESS, FAILURE or REVOKED; `Client.position` knows more."""

    def ready(self) -> bool:
        """Whether it has ended."""

    def successful(self) -> bool:
        """Whether it has ended well."""

    def failed(self) -> bool:
        """Whether it has ended with an error."""

    @overload
    def get(self, timeout: float | None = None, *, interval: float = 0.5, disable_sync_subtasks: bool = True) -> R: ...

    @overload
    def get(
        self,
        timeout: float | None = None,
        propagate: bool = True,
        interval: float = 0.5,
        *,
        disable_sync_subtasks: bool = True,
    ) -> R | BaseException: ...

    def revoke(self, *, terminate: bool = False) -> None:
        """Ends it wherever it is; with one of ours `terminate` makes no difference."""

    def forget(self) -> None:
        """Deletes its result."""


class CallOptions(TypedDict, total=False):
    """Of `apply_async` (docs/canvas.md): how the job is queued, not what it does. Seconds, if they are numbers."""

    idempotency_key: str | None
    idempotency_scope: str
    task_id: str | None
    queue: object  # a name, or a kombu.Queue
    priority: int | None
    countdown: float | None
    eta: datetime | None
    expires: float | datetime | None
    ignore_result: bool
    link: object  # a signature, or a list of them
    link_error: object
    retry: bool
    retry_policy: Mapping[str, float | None]
    headers: Mapping[str, object]
    compression: str | None
    serializer: Literal["json"]
    shadow: str | None
    time_limit: float | None
    soft_time_limit: float | None


class TypedTask(Protocol[C, R]):
    """What all tasks have. `C` is what a call may be given by name, `R` the result."""

    name: str

    def apply_async(
        self, args: Sequence[object] | None = None, kwargs: C | None = None, **options: Unpack[CallOptions]
    ) -> QueuedJob[R]:
        """Queues a job with options of Celery. Raises InvalidJob, RedisUnreachable, RedisRefused."""

    def s(self, *args: object, **kwargs: object) -> Signature:
        """A step of a canvas; `model` must be given by name where a parent's result comes first."""

    def si(self, *args: object, **kwargs: object) -> Signature:
        """A step that takes nothing of its parent."""

    def map(self, it: Iterable[object]) -> group:
        """One job for each, side by side."""

    def starmap(self, it: Iterable[Sequence[object]]) -> group:
        """One job for each, with its arguments."""
