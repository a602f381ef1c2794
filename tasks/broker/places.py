"""How many jobs of which model a worker may hold, and from whose queues it takes the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from cellama.tasks.contract.names import DEFAULT_MODEL, model_of

HeldJobs = Mapping[str, Sequence[int]]  # by queue: the weight of each message that is held


class Places:
    """Each model has places of its own, so a backlog of one takes none from another.

    A model has as many as it works on at once, and `look_ahead` more, which wait inside the worker.
    """

    def __init__(self, jobs: Mapping[str, int], look_ahead: int, default: Callable[[], str | None]) -> None:
        """`jobs` is kept up by its owner as models come and go; `default` names the model that serves `:default`."""
        self._jobs = jobs
        self._look_ahead = look_ahead
        self._default = default

    def model_of(self, queue: str) -> str:
        """The model that serves a queue; a queue that is no model's stands for itself."""
        model = model_of(queue)
        return self._default() or model if model == DEFAULT_MODEL else model

    def _limit(self, model: str) -> int:
        return max(1, self._jobs.get(model, 0) + self._look_ahead)

    def room_for_urgent(self, queues: Iterable[str], urgent: HeldJobs) -> dict[str, int]:
        """How many urgent jobs the model of each queue has room for: bulk jobs that are held don't count."""
        held: dict[str, int] = {}
        for queue, weights in urgent.items():
            model = self.model_of(queue)
            held[model] = held.get(model, 0) + len(weights)
        return self._room(queues, held)

    def room_for_bulk(self, queues: Iterable[str], urgent: HeldJobs, bulk: HeldJobs) -> dict[str, int]:
        """How many bulk jobs the model of each queue has room for.

        A chunk of a bulk run counts as many jobs, but for no more than half of a model's places: so there are two of
        them, and slots go from the one to the other.
        """
        held: dict[str, int] = {}
        for jobs in (urgent, bulk):
            for queue, weights in jobs.items():
                model = self.model_of(queue)
                most = (self._limit(model) + 1) // 2
                held[model] = held.get(model, 0) + sum(min(weight, most) for weight in weights)
        return self._room(queues, held)

    def _room(self, queues: Iterable[str], held: Mapping[str, int]) -> dict[str, int]:
        models = {queue: self.model_of(queue) for queue in queues}
        return {queue: max(0, self._limit(model) - held.get(model, 0)) for queue, model in models.items()}

    def by_model(self, queues: Iterable[str]) -> list[list[str]]:
        """The queues of each model together, in the given order of the models."""
        groups: dict[str, list[str]] = {}
        for queue in queues:
            groups.setdefault(self.model_of(queue), []).append(queue)
        return list(groups.values())
