"""How many jobs of which model a worker may hold, and how many more it has capacity for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from cellama.tasks.contract.names import DEFAULT_MODEL, model_of

HeldJobs = Mapping[str, Sequence[int]]  # by queue: the weight of each message that is held


class Places:
    """Each model has places of its own, so a backlog of one takes none from another.

    A model has as many as it works on at the same time, and `look_ahead` more for jobs that wait inside the worker.
    """

    def __init__(self, jobs: Mapping[str, int], look_ahead: int, default: Callable[[], str | None]) -> None:
        """`jobs` is kept up by its owner as models come and go; `default` names the model that serves `:default`."""
        self._jobs = jobs
        self._look_ahead = look_ahead
        self._default = default

    def model_of(self, queue: str) -> str:
        """Return the model that serves a queue. A queue that belongs to no model stands for itself."""
        model = model_of(queue)
        return self._default() or model if model == DEFAULT_MODEL else model

    def capacity(self, queues: Iterable[str], *held: HeldJobs) -> dict[str, int]:
        """Return how many more jobs the model of each queue may get, in addition to those that are `held`.

        A chunk of a bulk run weighs as much as its lines, but at most half of the places of a model. So a model holds
        two chunks, and the slots that the first one leaves go to the second one.
        """
        free: dict[str, int] = {}
        models = {queue: self.model_of(queue) for queue in queues}
        for model in models.values():
            free[model] = self._limit(model)
        for queue, weights in (item for jobs in held for item in jobs.items()):
            model = self.model_of(queue)
            if model in free:
                most = (self._limit(model) + 1) // 2
                free[model] -= sum(min(weight, most) for weight in weights)
        return {queue: max(0, free[model]) for queue, model in models.items()}

    def _limit(self, model: str) -> int:
        return max(1, self._jobs.get(model, 0) + self._look_ahead)

    def by_model(self, queues: Iterable[str]) -> list[list[str]]:
        """Return the queues of each model together, in the given order of the models."""
        groups: dict[str, list[str]] = {}
        for queue in queues:
            groups.setdefault(self.model_of(queue), []).append(queue)
        return list(groups.values())
