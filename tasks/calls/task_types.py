"""The types that all tasks share, for type checkers, because Celery itself is not typed.

The types of each task are in `tasks/typed_tasks.py`. Signatures and groups have Celery's types.
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
    """A queued job, which is Celery's AsyncResult at run time. `Client.job` and `cellama jobs` accept its `id`."""

    id: str

    @property
    def state(self) -> str:
        """PENDING until the job has ended, then SUCCESS, FAILURE or REVOKED. `Client.position` returns more details."""

    def ready(self) -> bool:
        """Return whether the job has ended."""

    def successful(self) -> bool:
        """Return whether the job has succeeded."""

    def failed(self) -> bool:
        """Return whether the job has failed."""

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
        """Cancel the job if it is waiting. With `terminate`, also cancel a running job."""

    def forget(self) -> None:
        """Delete the job's result."""


class CallOptions(TypedDict, total=False):
    """Options of `apply_async` (docs/canvas.md), which determine how the job is queued. Times are in seconds."""

    idempotency_key: str | None
    idempotency_scope: str
    fairness_key: str | None
    task_id: str | None
    queue: object  # a name or a kombu.Queue
    priority: int | None
    countdown: float | None
    eta: datetime | None
    expires: float | datetime | None
    ignore_result: bool
    link: object  # a signature or a list of signatures
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
    """The methods that all tasks have. `C` is the type of a call's named arguments, and `R` the type of the result."""

    name: str

    def apply_async(
        self, args: Sequence[object] | None = None, kwargs: C | None = None, **options: Unpack[CallOptions]
    ) -> QueuedJob[R]:
        """Queue a job with these Celery options. Raises InvalidJob, RedisUnreachable or RedisRefused."""

    def s(self, *args: object, **kwargs: object) -> Signature:
        """Return a canvas step. Pass `model` by name if the result of the previous step is the first argument."""

    def si(self, *args: object, **kwargs: object) -> Signature:
        """Return a canvas step that ignores the result of the previous step."""

    def map(self, it: Iterable[object]) -> group:
        """Return a group with one job per argument."""

    def starmap(self, it: Iterable[Sequence[object]]) -> group:
        """Return a group with one job per item. Each item contains the positional arguments of one call."""
