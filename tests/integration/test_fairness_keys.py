"""Every producer sets the fairness key of its jobs: clients, bulk runs, the settings and the gateway."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator

import anthropic
import openai
import pytest
from redis import Redis

from cellama.api import AsyncClient, Client, InvalidJob
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.contract.keys import job_key

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from .conftest import STORY
from .test_gateway_tenants import Keyed


@pytest.fixture
def key_of(redis_client: Redis) -> Callable[[str], str | None]:
    """Return a function that returns the fairness key of a job, or None if it has no key."""

    def read(job_id: str) -> str | None:
        value = redis_client.hget(job_key(job_id), "fairness_key")
        return None if value is None else value.decode()  # type: ignore[union-attr]

    return read


@pytest.fixture(scope="module")
def keyed(
    worker: WorkerProcess, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Keyed]:
    """A gateway that divides the share of each tenant between its users."""
    keyed = Keyed(tmp_path_factory.mktemp("keyed"), redis_server.url, CELLAMA_GATEWAY_USER_SHARES="true")
    try:
        keyed.process.wait_ready()
        yield keyed
    finally:
        keyed.process.stop()


def test_clients_set_the_fairness_key_of_one_or_many_jobs(unserved: str, key_of: Callable[[str], str | None]) -> None:
    async def queue() -> str:
        async with AsyncClient() as client:
            return (await client.chat(unserved, [{"role": "user", "content": "Hi"}], wait=True, fairness_key="c")).id

    with Client() as client:
        one = client.generate(unserved, STORY, wait=True, fairness_key="a/b")
        many = client.embed_many(unserved, ["a", "b"], wait=True, fairness_key="b")
        assert [key_of(job.id) for job in (one, *many)] == ["a/b", "b", "b"]
        assert key_of(asyncio.run(queue())) == "c"
        with pytest.raises(InvalidJob, match="fairness_key"):
            client.generate(unserved, STORY, wait=True, fairness_key="a/")
        client.purge(unserved)


def test_setting_defines_the_tenant_of_jobs_without_a_key_or_scope(
    redis_server: RedisServer,
    unserved: str,
    key_of: Callable[[str], str | None],
    settings_environment: Callable[..., None],
) -> None:
    settings_environment(redis_url=redis_server.url, default_fairness_key="my-app")
    with Client(redis_server.url) as client:
        jobs = [
            client.generate(unserved, STORY, wait=True),
            client.generate(unserved, STORY, wait=True, cache_scope="scope"),
            client.generate(unserved, STORY, wait=True, fairness_key="mine"),
        ]
        assert [key_of(job.id) for job in jobs] == ["my-app", "scope", "mine"]
        client.purge(unserved)


def test_service_used_by_ended_jobs_counts_toward_their_tenant(worker: WorkerProcess, redis_client: Redis) -> None:
    def service() -> float:
        with Client() as client:
            return next((share.service for share in client.tenants() if share.key == tenant), 0.0)

    tenant = f"service-{uuid.uuid4().hex[:8]}"
    with Client() as client:
        job = client.generate("tiny", STORY, max_tokens=7, ignore_eos=True, fairness_key=tenant)
        usage = job.result(PATIENCE_S)["usage"]
    wait_until(service, "the service of the tenant")
    computed = usage["prompt_tokens"] - usage["cached_tokens"]
    assert service() == pytest.approx(7 + 0.1 * computed)


def test_bulk_run_sets_the_fairness_key_of_its_jobs(
    worker: WorkerProcess, redis_client: Redis, key_of: Callable[[str], str | None]
) -> None:
    def chunks() -> set[str]:
        keys = [key.decode() for key in redis_client.scan_iter(job_key("*"), count=1000)]
        return {key for key in keys if redis_client.hget(key, "task") == b"cellama.chunk"}

    before = chunks()
    with Client() as client:
        client.batch([STORY] * 3, model="tiny", max_tokens=2, fairness_key="run")
        with pytest.raises(InvalidJob, match="fairness_key"):
            client.batch([STORY], model="tiny", fairness_key="/")
    new = chunks() - before
    assert new
    assert {key_of(key.removeprefix(job_key(""))) for key in new} == {"run"}


def test_gateway_sets_the_tenant_of_the_api_key_and_the_user_below_the_tenant(
    keyed: Keyed, key_of: Callable[[str], str | None]
) -> None:
    key = keyed.add(tenant="acme")
    with keyed.client(key.text) as client:
        ids = [
            client.completions.create(model="tiny", prompt=STORY, max_tokens=1, user="anna").id,
            client.completions.create(model="tiny", prompt=STORY, max_tokens=1).id,
        ]
        assert [key_of(each.removeprefix("cmpl-")) for each in ids] == ["acme/anna", "acme"]
        response = client.responses.create(model="tiny", input="Hi", max_output_tokens=1, user="b/c")
        assert response.status in ("completed", "incomplete")
        with pytest.raises(openai.BadRequestError, match="fairness_key"):
            client.completions.create(model="tiny", prompt=STORY, extra_body={"fairness_key": "other"})
    url = keyed.process.url
    with anthropic.Anthropic(base_url=url, api_key=key.text, max_retries=0, timeout=PATIENCE_S) as claude:
        message = claude.messages.create(
            model="tiny",
            max_tokens=1,
            messages=[{"role": "user", "content": "Hi"}],
            metadata={"user_id": "ben"},
        )
    assert key_of(message.id.removeprefix("msg_")) == "acme/ben"
