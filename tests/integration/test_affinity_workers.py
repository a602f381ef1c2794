"""Two real workers: the turns of a chat stay on the worker that holds them."""

from __future__ import annotations

from typing import Any

from redis import Redis

from cellama.tasks import chat
from cellama.tasks.contract.keys import held_prefixes_key
from cellama.tasks.state.registry import live_workers

from ..conftest import PATIENCE_S, wait_until
from .conftest import GREEDY, StartWorker, read

STEP_S = 0.5  # per step, so that computing a prompt again takes much longer than handing a job over
OPENING = "The little fox number {} lived in a green forest, and every day it went to the river. " * 20


def test_turns_of_a_chat_stay_on_one_worker(start_worker: StartWorker, model: str, redis_client: Redis) -> None:
    first, second = start_worker(step_s=STEP_S), start_worker(step_s=STEP_S)
    chats: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": OPENING.format(*[number] * 20)}] for number in range(3)
    ]
    workers: list[set[str]] = [set(), set(), set()]
    for turn in range(3):
        for messages, used in zip(chats, workers, strict=True):
            job = chat.delay(model, messages, max_tokens=2, **GREEDY)
            result = job.get(timeout=PATIENCE_S)
            assert (result["usage"]["cached_tokens"] > 300) == (turn > 0)
            used.add(read(redis_client, job.id)[0]["worker"])
            messages += [result["message"], {"role": "user", "content": f"And in year {turn}?"}]
    assert [len(used) for used in workers] == [1, 1, 1]
    assert len(set.union(*workers)) == 2
    for worker in (first, second):
        worker.stop()
    assert not redis_client.keys(held_prefixes_key(f"*{model}*"))


def test_jobs_of_a_killed_worker_are_taken_by_other_workers(
    start_worker: StartWorker, model: str, redis_client: Redis
) -> None:
    first = start_worker(step_s=STEP_S, lease_s=3)
    messages = [{"role": "user", "content": OPENING.format(*[7] * 20)}]
    chat.delay(model, messages, max_tokens=2, **GREEDY).get(timeout=PATIENCE_S)
    first.process.kill()
    start_worker(lease_s=3)
    wait_until(lambda: len([w for w in live_workers(redis_client) if model in w.name]) >= 1, "the second worker")
    assert redis_client.keys(held_prefixes_key("*"))  # the first worker still counts as a holder
    result = chat.delay(model, messages, max_tokens=2, **GREEDY).get(timeout=PATIENCE_S)
    assert result["usage"]["cached_tokens"] < 20
