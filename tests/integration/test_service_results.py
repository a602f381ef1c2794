"""Results and streams of jobs on a real worker."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from redis import Redis, asyncio as aioredis

from cellama.api.machine.redis_server import RedisServer
from cellama.tasks import app, apply_chat_template, chat, detokenize, embed, generate, tokenize
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.contract.journal import events_in
from cellama.tasks.contract.keys import job_key, journal_key
from cellama.tasks.state.job_record import JobRecord, read_job

from ..conftest import PATIENCE_S, SLOTS, WorkerProcess, clean_environment, wait_until
from .conftest import GREEDY

EventsOf = Callable[..., list[dict[str, Any]]]
pytestmark = pytest.mark.usefixtures("worker")


def test_prediction_does_not_change_the_text_and_is_validated() -> None:
    for prediction in (None, {"type": "content", "content": ", there was a little fox named Leo"}):
        job = generate.delay("tiny", "Once upon a time", max_tokens=32, prediction=prediction, **GREEDY)
        assert job.get(timeout=PATIENCE_S)["text"].startswith(", there was a little fox named Mia")
    with pytest.raises(JobFailed, match="prediction has token ids outside"):
        generate.delay("tiny", "Once upon a time", prediction=[2**30]).get(timeout=PATIENCE_S)


def test_record_of_a_job_has_usage_and_timings_also_after_its_journal_has_expired(
    redis_server: RedisServer, redis_client: Redis
) -> None:
    async def read(job_id: str) -> JobRecord | None:
        async with aioredis.Redis.from_url(redis_server.url) as redis:
            return await read_job(redis, job_id)

    job = generate.delay("tiny", "Once upon a time", max_tokens=4, **GREEDY)
    result = job.get(timeout=PATIENCE_S)
    for _ in range(2):
        record = asyncio.run(read(job.id))
        assert record is not None
        assert record.end is not None
        assert (record.end["usage"], record.end["timings"]) == (result["usage"], result["timings"])
        redis_client.delete(journal_key(job.id))


def test_generate_returns_text_usage_and_timings() -> None:
    result = generate.delay("tiny", "Once upon a time", max_tokens=32, **GREEDY).get(timeout=PATIENCE_S)
    assert result["text"].startswith(", there was a little fox named Mia")
    assert result["finish_reason"] == "length"
    usage = result["usage"]
    assert (cached := usage["cached_tokens"]) in range(4)  # other tests may have left cached prefixes
    assert usage["cache_hit_kind"] == ("cold" if not cached else "exact" if cached == 3 else "partial")
    assert usage["cache_tier"] in (("device", "ram") if cached else (None,))
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 32)
    assert usage["accepted_prediction_tokens"] < 32
    assert result["model"] == "tiny"
    assert 0 <= result["seq_id"] < SLOTS
    timings = result["timings"]
    assert 0 < timings["delivery_ms"] <= timings["queue_ms"] <= timings["ttft_ms"] <= timings["duration_ms"]
    assert timings["prefix_wait_ms"] == 0
    assert timings["prompt_eval_rate"] > 0
    assert timings["generation_rate"] > 0


def test_generate_stops_at_a_stop_string() -> None:
    result = generate.delay("tiny", "Once upon a time", stop=[" named"], **GREEDY).get(timeout=PATIENCE_S)
    assert result["text"] == ", there was a little fox"
    assert (result["finish_reason"], result["stop_sequence"]) == ("stop", " named")


def test_generate_accepts_token_ids_and_uses_the_default_model() -> None:
    first = generate.delay("tiny", "Once upon a time", max_tokens=8, **GREEDY)
    tokens = [t for e in _stored(first) for t in e.get("tokens", [])]
    result = generate.delay(":default", tokens, max_tokens=4, **GREEDY).get(timeout=PATIENCE_S)
    assert result["model"] == "tiny"
    assert result["usage"]["prompt_tokens"] == 8


def test_result_contains_context_tokens_when_requested() -> None:
    prompt = tokenize.delay("tiny", "Once upon a time").get(timeout=PATIENCE_S)["tokens"]
    job = generate.delay("tiny", "Once upon a time", max_tokens=8, return_tokens=True, **GREEDY)
    result = job.get(timeout=PATIENCE_S)
    assert result["tokens"] == [token for event in _stored(job) for token in event.get("tokens", [])]
    assert result["context_tokens"] == [*prompt, *result["tokens"]]
    again = generate.delay("tiny", "Once upon a time", max_tokens=8, **GREEDY).get(timeout=PATIENCE_S)
    assert again["cache_hit_kind"] == "exact"
    assert not {"tokens", "context_tokens"} & again.keys()


def _stored(job: Any) -> list[Any]:
    job.get(timeout=PATIENCE_S)
    with Redis.from_url(app.conf.broker_url) as redis:
        entries: Any = wait_until(lambda: redis.xrange(journal_key(job.id)), "the journal")
        return list(events_in(entries))


def test_generate_supports_schemas_several_completions_and_logprobs() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
    result = generate.delay("tiny", "A fox:", json_schema=schema, max_tokens=60, **GREEDY).get(timeout=PATIENCE_S)
    assert set(json.loads(result["text"])) == {"name"}
    job = generate.delay("tiny", "Once upon a time", n=3, seed=1, max_tokens=8, logprobs=1, logit_bias={"0": -1.0})
    result = job.get(timeout=PATIENCE_S)
    assert [choice["index"] for choice in result["choices"]] == [0, 1, 2]
    assert result["choices"][0]["text"] == result["text"]
    assert result["usage"]["completion_tokens"] == sum(len(choice["logprobs"]) for choice in result["choices"])
    tokens = [e for e in _stored(job) if e["type"] == "token"]
    assert "".join(e["text"] for e in tokens if e.get("index") == 2) == result["choices"][2]["text"]
    assert all(len(e["logprobs"]) == len(e["tokens"]) for e in tokens)


def test_same_seed_produces_the_same_text_and_the_seed_is_returned() -> None:
    # One after another and without cached prefixes, so that batches and logits are identical.
    params = {"max_tokens": 40, "temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "cache_prompt": False}
    first, same, other = [
        generate.delay("tiny", "Once upon a time", seed=seed, **params).get(timeout=PATIENCE_S) for seed in (0, 0, 1)
    ]
    assert first["text"] == same["text"] != other["text"]
    assert [first["seed"], other["seed"]] == [0, 1]
    drawn = generate.delay("tiny", "Once upon a time", **params).get(timeout=PATIENCE_S)
    again = generate.delay("tiny", "Once upon a time", seed=drawn["seed"], **params).get(timeout=PATIENCE_S)
    assert drawn["text"] == again["text"]


def test_chat_uses_the_template_of_the_model() -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    result = chat.delay("tiny", messages, **GREEDY).get(timeout=PATIENCE_S)
    assert result["message"] == {"role": "assistant", "content": "The capital of France is Paris."}
    assert result["finish_reason"] == "stop"


def test_tokenize_and_template_jobs_do_not_use_the_engine(worker: WorkerProcess) -> None:
    text, messages = "Once upon a time, café 🦊", [{"role": "user", "content": "Hi"}]
    before = worker.engine_now()["requests_finished"]
    tokens = tokenize.delay("tiny", text).get(timeout=PATIENCE_S)["tokens"]
    assert detokenize.delay("tiny", tokens).get(timeout=PATIENCE_S) == {"text": text, "model": "tiny"}
    rendered = apply_chat_template.delay("tiny", messages).get(timeout=PATIENCE_S)
    assert rendered["prompt"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    parsed = tokenize.delay("tiny", rendered["prompt"], parse_special=True).get(timeout=PATIENCE_S)["tokens"]
    assert parsed == rendered["tokens"]
    assert worker.engine_now()["requests_finished"] == before
    with pytest.raises(JobFailed, match="outside the range 0 to"):
        detokenize.delay("tiny", [10**6]).get(timeout=PATIENCE_S)


def test_embed_returns_one_unit_vector_per_text_in_order() -> None:
    texts = ["a red fox", "a green frog", "a red fox"]
    result = embed.delay("tiny", texts).get(timeout=PATIENCE_S)
    vectors = np.array(result["embeddings"])
    assert vectors.shape[0] == 3
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    # in a batch, llama.cpp computes a text in a different order than alone
    assert np.allclose(vectors[0], vectors[2], atol=1e-2)
    assert not np.allclose(vectors[0], vectors[1], atol=1e-2)
    alone = embed.delay("tiny", "a green frog").get(timeout=PATIENCE_S)["embeddings"][0]
    assert np.allclose(vectors[1], alone, atol=1e-2)


def test_embed_honours_dimensions_normalize_truncate_and_encoding() -> None:
    texts, whole = ["a red fox"], {"normalize": False}
    raw = np.array(embed.delay("tiny", texts, **whole).get(timeout=PATIENCE_S)["embeddings"][0])
    assert abs(np.linalg.norm(raw) - 1) > 0.01
    short = np.array(embed.delay("tiny", texts, dimensions=16).get(timeout=PATIENCE_S)["embeddings"][0])
    assert np.allclose(short, raw[:16] / np.linalg.norm(raw[:16]), atol=1e-2)
    encoded = embed.delay("tiny", texts, encoding="base64").get(timeout=PATIENCE_S)["embeddings"][0]
    decoded = np.frombuffer(base64.b64decode(encoded), dtype="<f4")
    assert np.allclose(decoded, raw / np.linalg.norm(raw), atol=1e-2)
    with pytest.raises(JobFailed, match=r"dimensions is 999; it must be from 1 to 192"):
        embed.delay("tiny", texts, dimensions=999).get(timeout=PATIENCE_S)
    long = "fox " * 3000
    with pytest.raises(JobFailed, match=r"has \d+ tokens, but the model's limit is 2048; split the text"):
        embed.delay("tiny", long).get(timeout=PATIENCE_S)
    assert len(embed.delay("tiny", long, truncate=True).get(timeout=PATIENCE_S)["embeddings"]) == 1


def test_events_have_consecutive_seqs_and_a_single_last_event_with_the_text_of_the_result(events_of: EventsOf) -> None:
    job = generate.delay("tiny", "Once upon a time", max_tokens=50, **GREEDY)
    events = events_of(job.id)
    result = job.get(timeout=PATIENCE_S)
    assert [event["seq"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "started"
    assert [e["type"] for e in events[1:]] == ["token"] * (len(events) - 2) + ["done"]
    assert "".join(e["text"] for e in events if e["type"] == "token") == result["text"]
    assert sum(len(e["tokens"]) for e in events if e["type"] == "token") == 50
    assert {k: events[-1][k] for k in ("finish_reason", "usage", "seed")} == {
        k: result[k] for k in ("finish_reason", "usage", "seed")
    }


def test_events_of_a_finished_job_can_be_replayed_from_any_seq(events_of: EventsOf, redis_client: Redis) -> None:
    job = generate.delay("tiny", "Once upon a time", max_tokens=20, **GREEDY)
    events = events_of(job.id)
    assert events_of(job.id) == events
    wait_until(lambda: redis_client.xlen(journal_key(job.id)) == 2, "the packed journal")
    assert [events_of(job.id, after=after) for after in range(-1, 22)] == [
        events[after + 1 :] for after in range(-1, 22)
    ]
    assert 0 < int(str(redis_client.ttl(journal_key(job.id)))) <= 3600


def test_job_without_stream_publishes_larger_chunks(events_of: EventsOf) -> None:
    job = generate.delay("tiny", "Once upon a time", max_tokens=20, logprobs=0, stream=False, **GREEDY)
    events = events_of(job.id)
    assert [len(event.get("tokens", [])) for event in events] == [0, 8, 8, 4, 0]
    assert [len(event.get("logprobs", [])) for event in events] == [0, 8, 8, 4, 0]
    assert "".join(event.get("text", "") for event in events) == job.get(timeout=PATIENCE_S)["text"]


PLAIN_PRODUCER = """
import json, sys, uuid
from celery import Celery
from redis import Redis
url, priority = sys.argv[1], json.loads(sys.argv[2])
app = Celery(broker=url, backend=url)
job_id = str(uuid.uuid4())
pubsub = Redis.from_url(url).pubsub()
pubsub.subscribe(f"cellama:events:0:{job_id}")
pubsub.get_message(timeout=10)
job = app.send_task("cellama.generate", ["tiny", "Once upon a time"], {"max_tokens": 12, "temperature": 0},
                    queue="cellama:queue:tiny", task_id=job_id, priority=priority)
events = []
for message in pubsub.listen():
    events.append(json.loads(message["data"]))
    if events[-1]["type"] in ("done", "error"):
        break
assert not [name for name in sys.modules if name.startswith("cellama")]
print(json.dumps({"result": job.get(timeout=30), "events": events}))
"""


@pytest.mark.parametrize("priority", [None, 0, 3, 9])
def test_plain_celery_producer_gets_result_and_events(
    redis_server: RedisServer, priority: int | None, tmp_path: Any
) -> None:
    argv = [sys.executable, "-c", PLAIN_PRODUCER, redis_server.url, json.dumps(priority)]
    done = subprocess.run(
        argv, env=clean_environment(), cwd=tmp_path, capture_output=True, timeout=PATIENCE_S, text=True
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [e["seq"] for e in told["events"]] == list(range(len(told["events"])))
    assert "".join(e.get("text", "") for e in told["events"]) == told["result"]["text"]
    assert told["result"]["text"].startswith(", there was a little fox")


def test_concurrent_jobs_produce_the_same_texts_as_single_jobs(worker: WorkerProcess) -> None:
    """The 32 jobs of different lengths share 16 slots."""
    prompts = [_prompt(i) for i in range(32)]
    alone = [generate.delay("tiny", p, max_tokens=48, **GREEDY).get(timeout=PATIENCE_S)["text"] for p in prompts]
    before = worker.engine()["mixed_steps"]
    with worker.slowed():  # so that later jobs arrive while the first ones run
        jobs = [generate.delay("tiny", p, max_tokens=48, **GREEDY) for p in prompts]
    assert [job.get(timeout=PATIENCE_S)["text"] for job in jobs] == alone
    wait_until(lambda: worker.engine()["mixed_steps"] > before, "steps that mix decode and prefill")


def _prompt(index: int) -> str:
    animal = ("fox", "bear", "cat", "frog", "mouse", "dragon")[index % 6]
    return (
        " ".join(["Once upon a time, there was a little fox."] * (index % 5)) + f"Once upon a time, a little {animal}"
    )


OUTLIVES = """
from cellama.api import Client
from cellama.tasks import generate
from cellama.tasks.contract.errors import JobTimeout
queued = generate.delay("nobody-serves-this", "Hi")
with Client() as client:
    job = client.generate("nobody-serves-this", "Hi", wait=True)
    try:
        job.result(timeout=0.01)
    except JobTimeout:
        print("too late")
    client.cancel(job.id)
    client.cancel(queued.id)
"""


def test_pending_results_print_nothing_when_the_program_exits(redis_server: RedisServer, tmp_path: Any) -> None:
    environment = clean_environment(CELLAMA_REDIS_URL=redis_server.url)
    argv = [sys.executable, "-c", OUTLIVES]
    done = subprocess.run(argv, env=environment, cwd=tmp_path, capture_output=True, timeout=PATIENCE_S, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "too late\n", "")


def test_timings_are_measured_from_submission(worker: WorkerProcess, redis_client: Redis, events_of: EventsOf) -> None:
    def queued_long_ago(**params: Any) -> Any:
        worker.process.send_signal(signal.SIGSTOP)
        try:
            job = generate.apply_async(("tiny", "Once"), {"max_tokens": 2, **params})
            assert redis_client.hget(job_key(job.id), "state") == b"queued"
            redis_client.hincrbyfloat(job_key(job.id), "submitted_at", -100)
        finally:
            worker.process.send_signal(signal.SIGCONT)
        return job

    assert 100_000 <= queued_long_ago().get(timeout=PATIENCE_S)["timings"]["queue_ms"] < 200_000
    late = queued_long_ago(timeout=50)
    assert late.get(timeout=PATIENCE_S)["finish_reason"] == "timeout"
    assert events_of(late.id)[-1]["usage"]["completion_tokens"] == 0


def test_timeout_is_measured_from_submission_and_keeps_the_partial_text(
    worker: WorkerProcess, events_of: EventsOf
) -> None:
    with worker.slowed():
        started = time.monotonic()
        job = generate.delay("tiny", "Once upon a time", max_tokens=1900, ignore_eos=True, timeout=0.3, **GREEDY)
        result = job.get(timeout=PATIENCE_S)
        assert time.monotonic() - started >= 0.3
    assert result["finish_reason"] == "timeout"
    assert result["timings"]["duration_ms"] >= 300
    end = events_of(job.id)[-1]
    assert (end["finish_reason"], end["usage"]) == ("timeout", result["usage"])
