"""Many jobs are queued at once: in order, all or none if one is invalid, and each with its ledger entry."""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery
from redis import Redis
from redis.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError, ResponseError

from cellama.api import AsyncClient, Client
from cellama.tasks import app, chat, generate
from cellama.tasks.calls.enqueue import PAGE_JOBS, enqueue, ranges
from cellama.tasks.contract.errors import InvalidJob, UnknownModel
from cellama.tasks.contract.keys import job_key
from cellama.tasks.contract.names import queue_key, queue_name
from cellama.tasks.state.ledger import Ledger, Message, Submission, TaskCall
from cellama.tasks.state.scripts import SentScript

from ..conftest import PATIENCE_S, wait_until
from .conftest import GREEDY
from .ledgers import num_ahead

NUM = PAGE_JOBS + 7


def messages(redis: Redis, model: str, priority: int = 3) -> list[dict[str, Any]]:
    """Return the messages of a queue, the next one first."""
    found: Any = redis.lrange(queue_key(queue_name(model), priority), 0, -1)
    return [json.loads(message) for message in reversed(found)]


def submission(job_id: str, model: str) -> Submission:
    message = Message(queue_key(queue_name(model), 3), json.dumps({"headers": {"id": job_id}}))
    return Submission(job_id, TaskCall(task="cellama.generate", queue=queue_name(model), priority=3), message)


class Watched(Ledger):
    """Records how many events each page has."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis)
        self.num_events: list[int] = []

    def send(self, jobs: Sequence[Submission], following: int) -> SentScript:
        self.num_events.append(sum(len(job.message.events) for job in jobs))
        return super().send(jobs, following)

    def submit(self, jobs: Sequence[Submission], following: int = 0) -> list[int]:
        self.num_events.append(sum(len(job.message.events) for job in jobs))
        return super().submit(jobs, following)


def test_generate_many_returns_results_in_the_order_of_the_prompts(client: Client) -> None:
    prompts = [f"What is {i} + 1?" for i in range(12)]
    jobs = client.generate_many("tiny", prompts, max_tokens=8, **GREEDY)
    together = [job.result(PATIENCE_S)["text"] for job in jobs]
    assert together == [client.generate("tiny", p, max_tokens=8, **GREEDY).result(PATIENCE_S)["text"] for p in prompts]


def test_chat_many_and_embed_many_return_the_same_results_as_single_calls(client: Client) -> None:
    conversation = [{"role": "user", "content": "What do bees make?"}]
    chats = client.chat_many("tiny", [conversation, conversation], **GREEDY)
    embedded = client.embed_many("tiny", ["a", ["b", "c"]])
    assert len({job.result(PATIENCE_S)["text"] for job in chats}) == 1
    assert [len(job.result(PATIENCE_S)["embeddings"]) for job in embedded] == [1, 2]


def test_async_client_submits_many_jobs_in_one_call(client: Client) -> None:
    async def run() -> list[str]:
        async with AsyncClient() as own:
            jobs = await own.generate_many("tiny", ["Hi", "Ho"], max_tokens=4, ignore_eos=True)
            return [(await job.result(PATIENCE_S))["finish_reason"] for job in jobs]

    assert asyncio.run(run()) == ["length", "length"]


def test_submitting_a_similar_job_takes_one_round_trip(
    client: Client, unserved: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = client.generate(unserved, "Hi", wait=True)
    commands: list[Any] = []
    send = AbstractConnection.send_packed_command

    def noted(connection: Any, command: Any, *options: Any, **others: Any) -> None:
        commands.append(command)
        send(connection, command, *options, **others)

    with monkeypatch.context() as watching:
        watching.setattr(AbstractConnection, "send_packed_command", noted)
        second = client.generate(unserved, "Ho", wait=True)
    assert len(commands) == 1, commands
    assert [message["headers"]["id"] for message in messages(redis_client, unserved)] == [first.id, second.id]


def test_messages_and_ranks_of_many_jobs_keep_their_order(unserved: str, redis_client: Redis) -> None:
    ids = generate.apply_many([((unserved, f"prompt {i}"), {}) for i in range(NUM)])
    assert [message["headers"]["id"] for message in messages(redis_client, unserved)] == ids
    bodies = [json.loads(base64.b64decode(message["body"])) for message in messages(redis_client, unserved)]
    assert [body[0][1] for body in bodies] == [f"prompt {i}" for i in range(NUM)]
    assert [num_ahead(Ledger(redis_client), job_id) for job_id in ids] == list(range(NUM))


def test_bulk_submission_message_equals_the_message_that_celery_sends(unserved: str, redis_client: Redis) -> None:
    plain = Celery(broker=app.conf.broker_url, backend=app.conf.broker_url)
    plain.conf.broker_transport_options = {"priority_steps": list(range(10))}
    kwargs = {"seed": 1, "priority": 5}
    plain.send_task("cellama.generate", [unserved, "Hi"], kwargs, queue=queue_name(unserved), priority=5)
    generate.apply_async((unserved, "Hi"), kwargs)
    generate.apply_many([((unserved, "Hi"), kwargs)])
    theirs, single, many = messages(redis_client, unserved, 5)
    for ours in (single, many):
        assert ours["body"] == theirs["body"]
        assert ours.keys() == theirs.keys()
        assert theirs["properties"].keys() <= ours["properties"].keys()
        assert ours["properties"]["delivery_info"] == theirs["properties"]["delivery_info"]
        assert ours["headers"].keys() - theirs["headers"].keys() == {"cellama_submitted_at"}
        assert theirs["headers"].keys() <= ours["headers"].keys()
    assert single["headers"].keys() == many["headers"].keys()
    assert "Hi" not in json.dumps([single["headers"], many["headers"]])


def test_bulk_submission_reports_all_invalid_jobs_and_queues_nothing(unserved: str, redis_client: Redis) -> None:
    calls: list[Any] = [((unserved, "Hi"), {}), ((unserved, ""), {}), ((unserved, "Hi"), {"top_k": -1})]
    with pytest.raises(InvalidJob, match=r"job 1, 3-4: prompt is ''.*; job 2: top_k is -1"):
        generate.apply_many([*calls, calls[1], calls[1]])
    assert messages(redis_client, unserved) == []
    assert Ledger(redis_client).num_waiting(queue_name(unserved)) == 0


def test_error_shows_adjacent_indexes_as_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_bulk_submission_with_idempotency_keys_queues_each_job_once(unserved: str, redis_client: Redis) -> None:
    keys = [f"{unserved} {i}" for i in range(3)]
    calls = [((unserved, "Hi"), {})] * 3
    first = generate.apply_many(calls[:2], keys[:2])
    assert generate.apply_many(calls, keys)[:2] == first
    assert generate.apply_async(calls[0][0], {}, idempotency_key=keys[2]).id not in first
    assert len(messages(redis_client, unserved)) == 3
    with pytest.raises(InvalidJob, match="keys: the list has 1 entries for 3 jobs"):
        generate.apply_many(calls, keys[:1])


def test_bulk_submission_for_an_unserved_model_is_rejected(client: Client, unserved: str) -> None:
    with pytest.raises(UnknownModel, match="no running worker serves"):
        client.generate_many(unserved, ["Hi"])
    assert len(client.generate_many(unserved, ["Hi"], wait=True)) == 1
    assert client.generate_many("tiny", []) == []


def test_task_sent_events_are_published_for_bulk_submissions(unserved: str, redis_client: Redis) -> None:
    with redis_client.pubsub() as pubsub:
        pubsub.psubscribe("*celeryev/task.sent")
        assert pubsub.get_message(timeout=PATIENCE_S)["type"] == "psubscribe"
        ids = generate.apply_many([((unserved, "a secret"), {})] * 2)
        told = [pubsub.get_message(timeout=PATIENCE_S)["data"] for _ in ids]
    events = [json.loads(base64.b64decode(json.loads(data)["body"])) for data in told]
    assert [(event["type"], event["uuid"], event["queue"]) for event in events] == [
        ("task-sent", job_id, queue_name(unserved)) for job_id in ids
    ]
    assert "a secret" not in json.dumps(events)


def test_task_sent_events_are_not_published_while_no_monitor_is_subscribed(unserved: str, redis_client: Redis) -> None:
    jobs = generate.check_many([((unserved, "Hi"), {})] * 4 * PAGE_JOBS)
    ledger = Watched(redis_client)
    assert list(enqueue(app, ledger, jobs, generate._publish, generate._template_key(is_bulk=True))) == [True] * len(
        jobs
    )
    assert ledger.num_events == [PAGE_JOBS, PAGE_JOBS, 1, 1]  # the second page is built before the first one is sent
    assert len(messages(redis_client, unserved)) == len(jobs)


def test_task_sent_events_resume_when_a_monitor_subscribes(unserved: str, redis_client: Redis) -> None:
    jobs = generate.check_many([((unserved, "Hi"), {})] * 6 * PAGE_JOBS)
    ledger = Watched(redis_client)
    with redis_client.pubsub() as pubsub:
        for number, _ in enumerate(enqueue(app, ledger, jobs, generate._publish, generate._template_key(is_bulk=True))):
            if number == 2 * PAGE_JOBS:
                pubsub.psubscribe("*celeryev/task.sent")
                assert pubsub.get_message(timeout=PATIENCE_S)["type"] == "psubscribe"
        assert ledger.num_events == [PAGE_JOBS, PAGE_JOBS, 1, 1, 1, PAGE_JOBS]


def test_lost_message_from_a_bulk_submission_is_queued_again_unchanged(unserved: str, redis_client: Redis) -> None:
    options = {"link": generate.si(unserved, "Ho"), "countdown": 60, "headers": {"own": 1}, "time_limit": 99}
    generate.apply_async((unserved, "Hi"), {"seed": 5}, **options)
    key = queue_key(queue_name(unserved), 3)
    message = redis_client.rpop(key)
    wait_until(lambda: Ledger(redis_client).add_tickets(key, 1), "two checks without the ticket")
    assert redis_client.lrange(key, 0, -1) == [message]


@pytest.mark.parametrize("lost", ["nothing", "script", "connection", "reply"])
def test_page_is_queued_once_when_its_request_or_reply_is_lost(redis_client: Redis, unserved: str, lost: str) -> None:
    if lost == "script":
        redis_client.script_flush()
    if lost == "connection":
        redis_client.connection_pool.disconnect()
    ids = [uuid.uuid4().hex for _ in range(3)]
    sent = Ledger(redis_client).send([submission(job_id, unserved) for job_id in ids], num_following=5)
    if lost == "reply":
        sent._connection.disconnect()
    assert len(sent.reply()[0]) == 3
    assert [message["headers"]["id"] for message in messages(redis_client, unserved)] == ids
    sent.close()
    assert redis_client.ping()


def test_page_rejected_by_redis_raises_an_error(redis_client: Redis, unserved: str) -> None:
    with Redis.from_url("redis://127.0.0.1:1") as nowhere, pytest.raises(RedisConnectionError):
        Ledger(nowhere).send([submission("any", unserved)], num_following=5).reply()
    redis_client.set(queue_key(queue_name(unserved), 3), "no list")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        Ledger(redis_client).send([submission("any", unserved)], num_following=5).reply()
    redis_client.delete(queue_key(queue_name(unserved), 3), job_key("any"))


def test_failed_bulk_submission_does_not_leak_connections(redis_client: Redis, unserved: str) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no more messages")

    jobs = [replace(job, fits_template=False) for job in generate.check_many([((unserved, "Hi"), {})] * NUM)]
    built = iter(range(PAGE_JOBS + 1))
    publish = generate._publish
    ledger = Ledger(redis_client)
    with pytest.raises(RuntimeError, match="no more messages"):
        list(enqueue(app, ledger, jobs, lambda *given: publish(*given) if next(built, None) is not None else fail()))
    wait_until(lambda: len(messages(redis_client, unserved)) == PAGE_JOBS, "the page in flight")
    assert redis_client.ping()


def test_idempotency_key_belongs_to_one_payload_per_task_and_scope(unserved: str) -> None:
    key = uuid.uuid4().hex
    first = generate.apply_async((unserved, "Hi"), {"seed": 1}, idempotency_key=key)
    assert generate.apply_async((), {"model": unserved, "prompt": "Hi", "seed": 1}, idempotency_key=key) == first
    with pytest.raises(InvalidJob, match="was used for a"):
        generate.apply_async((unserved, "Ho"), {"seed": 1}, idempotency_key=key)
    with pytest.raises(InvalidJob, match="was used for"):
        generate.apply_many([((unserved, "Ho"), {})], [key])
    others = [
        generate.apply_async((unserved, "Ho"), {"cache_scope": "tenant"}, idempotency_key=key),
        generate.apply_async((unserved, "Ho"), {}, idempotency_key=key, idempotency_scope="other"),
        chat.apply_async((unserved, [{"role": "user", "content": "Hi"}]), {}, idempotency_key=key),
    ]
    assert len({first.id, *(other.id for other in others)}) == 4


def test_messages_from_a_template_differ_only_in_values_of_their_job(unserved: str, redis_client: Redis) -> None:
    for prompt in ("One", "Two"):  # the second message is made like the first one
        generate.delay(unserved, prompt, max_tokens=3)
    generate.apply_async((unserved, "Three"), {"max_tokens": 3}, retries=0)  # built by Celery
    found = messages(redis_client, unserved)
    assert len({message["properties"]["delivery_tag"] for message in found}) == 3
    for message, prompt in zip(found, ("One", "Two", "Three"), strict=True):
        body = json.loads(base64.b64decode(message["body"]))
        assert body[:2] == [[unserved, prompt], {"max_tokens": 3}]
        job_id = message["headers"]["id"]
        assert message["headers"]["root_id"] == message["properties"]["correlation_id"] == job_id
        message["body"] = body[2]
        message["headers"] |= {"id": "", "root_id": "", "cellama_submitted_at": 0.0}
        message["properties"] |= {"correlation_id": "", "delivery_tag": ""}
    assert found[0] == found[1] == found[2]
