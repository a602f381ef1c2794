"""Send jobs, canvases, streams and cancellations with the installed cellama, Celery, kombu and redis-py.

Runs in an environment that has the base package only, against a worker that serves the model `tiny`. Needs
CELLAMA_REDIS_URL. Prints one line per step, and exits with 1 if a step failed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable

from celery import Celery, chain, chord

import cellama.tasks
from cellama.api import AsyncClient, Client
from cellama.tasks import generate
from cellama.tasks.contract.errors import InvalidJob, JobCancelled, JobFailed, UnknownModel

URL = os.environ["CELLAMA_REDIS_URL"]
MODEL = "tiny"
TIMEOUT_S = 30.0
NUM_STREAMS = 50
LONG = {"max_tokens": 2000, "ignore_eos": True}

shop = Celery("shop", broker=URL, backend=URL, set_as_current=True)
shop.conf.task_default_queue = "shop"
shop.conf.broker_connection_retry_on_startup = True


@shop.task(name="shop.shout")
def shout(result: dict[str, str]) -> str:
    return result["text"].upper()


@shop.task(name="shop.count")
def count(results: list[dict[str, str]]) -> int:
    return len(results)


@shop.task(name="shop.prompt_of")
def prompt_of() -> str:
    return "A fox"


def check_delay() -> None:
    result = generate.delay(MODEL, "A fox", max_tokens=8, ignore_eos=True).get(timeout=TIMEOUT_S)
    assert result["text"], result


def check_stream() -> None:
    with Client() as client:
        job = client.generate(MODEL, "A fox", max_tokens=16, ignore_eos=True, stream=True)
        kinds = [event["type"] for event in job.stream()]
        assert "token" in kinds, kinds
        assert kinds[-1] == "done", kinds
        assert job.result(TIMEOUT_S)["text"]
        assert job.position().state == "done", job.position()


def check_cancel() -> None:
    with Client() as client:
        job = client.generate(MODEL, "A fox", stream=True, **LONG)
        events = job.stream()
        assert any(event["type"] == "token" for event in events)
        job.cancel()
        try:
            job.result(TIMEOUT_S)
        except JobCancelled:
            return
        raise AssertionError("the job was not cancelled")


def check_many() -> None:
    with Client() as client:
        jobs = client.generate_many(MODEL, [f"Number {number}" for number in range(100)], max_tokens=4, ignore_eos=True)
        assert len({job.result(TIMEOUT_S)["text"] is None for job in jobs}) == 1


def check_embed() -> None:
    with Client() as client:
        (vector,) = client.embed(MODEL, ["A fox"]).result(TIMEOUT_S)["embeddings"]
        assert len(vector) > 1


def check_chain() -> None:
    steps = chain(generate.s(MODEL, "A fox", max_tokens=8, ignore_eos=True), shout.s())
    text = steps.apply_async().get(timeout=TIMEOUT_S)
    assert text == text.upper() != "", text


def check_chord() -> None:
    header = [generate.s(MODEL, f"Number {number}", max_tokens=4, ignore_eos=True) for number in range(5)]
    assert chord(header)(count.s()).get(timeout=TIMEOUT_S) == 5


def check_mixed_chord() -> None:
    """A worker of cellama and a worker of the user count the parts of one chord."""
    for number in range(10):
        header = [generate.s(MODEL, f"Number {number}", max_tokens=1 + number), prompt_of.s(), prompt_of.s()]
        assert chord(header)(count.s()).get(timeout=TIMEOUT_S) == len(header)


def check_job_after_a_task() -> None:
    steps = chain(prompt_of.s(), generate.s(model=MODEL, max_tokens=4, ignore_eos=True))
    result = steps.apply_async().get(timeout=TIMEOUT_S)
    assert result["text"], result


def check_invalid_step() -> None:
    """A job after a task that is invalid fails the chain instead of leaving it without a result."""
    steps = chain(prompt_of.s(), generate.s(model=MODEL, max_tokens=-1), shout.s())
    try:
        steps.apply_async().parent.get(timeout=TIMEOUT_S)
    except JobFailed:
        return
    raise AssertionError("the invalid step did not fail")


def check_refusals() -> None:
    with Client() as client:
        for call, expected in (
            (lambda: client.generate(MODEL, "A fox", max_tokens=-1), InvalidJob),
            (lambda: client.generate("nobody-serves-this", "A fox"), UnknownModel),
        ):
            try:
                call()
            except expected:
                continue
            raise AssertionError(f"{expected.__name__} was not raised")


def check_by_name() -> None:
    job = shop.send_task("cellama.generate", [MODEL, "A fox"], {"max_tokens": 4}, queue=f"cellama:queue:{MODEL}")
    assert job.get(timeout=TIMEOUT_S)["text"]


def check_async_streams() -> None:
    async def read(client: AsyncClient, number: int) -> int:
        job = await client.generate(MODEL, f"Number {number}", max_tokens=16, ignore_eos=True, stream=True)
        num_tokens = 0
        async for event in job.stream():
            num_tokens += event["type"] == "token"
        assert (await job.result(TIMEOUT_S))["text"]
        return num_tokens

    async def main() -> None:
        async with AsyncClient() as client:
            counts = await asyncio.gather(*(read(client, number) for number in range(NUM_STREAMS)))
            assert all(counts), counts
            job = await client.generate(MODEL, "A fox", stream=True, **LONG)
            async for event in job.stream():
                if event["type"] == "token":
                    await job.cancel()
                    break
            try:
                await job.result(TIMEOUT_S)
            except JobCancelled:
                return
            raise AssertionError("the job was not cancelled")

    asyncio.run(main())


def check_django() -> None:
    import django
    from channels.layers import get_channel_layer
    from django.conf import settings
    from django.core.cache import cache
    from django.core.management import call_command

    settings.configure(
        INSTALLED_APPS=["django_celery_beat"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        CACHES={"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": URL}},
        CHANNEL_LAYERS={"default": {"BACKEND": "channels_redis.core.RedisChannelLayer", "CONFIG": {"hosts": [URL]}}},
        USE_TZ=True,
    )
    django.setup()
    call_command("migrate", verbosity=0)
    from django_celery_beat.models import IntervalSchedule, PeriodicTask
    from django_celery_beat.schedulers import DatabaseScheduler

    every = IntervalSchedule.objects.create(every=1, period=IntervalSchedule.HOURS)
    PeriodicTask.objects.create(name="story", task="cellama.generate", args=f'["{MODEL}", "A fox"]', interval=every)
    assert "story" in DatabaseScheduler(app=shop).schedule
    cache.set("story", generate.delay(MODEL, "A fox", max_tokens=4, ignore_eos=True).get(timeout=TIMEOUT_S)["text"])
    assert cache.get("story")

    async def exchange() -> dict[str, str]:
        layer = get_channel_layer()
        await layer.send("story", {"type": "story"})
        return await layer.receive("story")

    assert asyncio.run(exchange()) == {"type": "story"}


def check_fastapi() -> None:
    import httpx
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse

    site = FastAPI()

    @site.get("/story")
    async def story() -> StreamingResponse:
        async def text() -> AsyncIterator[str]:
            async with AsyncClient() as client:
                job = await client.generate(MODEL, "A fox", max_tokens=16, ignore_eos=True, stream=True)
                async for event in job.stream():
                    if event["type"] == "token":
                        yield event["text"]

        return StreamingResponse(text(), media_type="text/plain")

    async def request() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(site), base_url="http://site") as client:
            return (await client.get("/story")).text

    assert asyncio.run(request())


CHECKS: dict[str, Callable[[], None]] = {
    "job": check_delay,
    "stream": check_stream,
    "cancel": check_cancel,
    "many": check_many,
    "embed": check_embed,
    "chain": check_chain,
    "chord": check_chord,
    "mixed chord": check_mixed_chord,
    "job after a task": check_job_after_a_task,
    "invalid step": check_invalid_step,
    "errors": check_refusals,
    "by name": check_by_name,
    "asyncio": check_async_streams,
}
# Checks that run where the package is installed.
FRAMEWORKS: dict[str, Callable[[], None]] = {"django": check_django, "fastapi": check_fastapi}


def main() -> int:
    assert "site-packages" in str(cellama.tasks.__file__), cellama.tasks.__file__
    if sys.argv[1:] == ["worker"]:
        shop.worker_main(["worker", "--pool=solo", "--loglevel=ERROR", "--without-gossip", "--without-mingle"])
        return 0
    num_failed = 0
    frameworks = {name: check for name, check in FRAMEWORKS.items() if importlib.util.find_spec(name)}
    for name, check in {**CHECKS, **frameworks}.items():
        started = time.monotonic()
        try:
            check()
        except Exception:
            traceback.print_exc()
            num_failed += 1
            print(f"{name}: failed")
        else:
            print(f"{name}: passed in {time.monotonic() - started:.1f} s")
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())
