"""A program of a user: mypy --strict --disallow-any-expr must find nothing in it. It is checked, never run."""

from __future__ import annotations

from cellama import tasks
from cellama.api import (
    AdapterView,
    AsyncClient,
    ChatMessage,
    Client,
    Event,
    InvalidJob,
    Job,
    JobFailed,
    MemoryView,
    ModelView,
    Result,
    Tool,
    __version__,
)

LOOK: Tool = {"type": "function", "function": {"name": "look"}}


def text_of(event: Event) -> str:
    if event["type"] == "token" or event["type"] == "reasoning":
        return event["text"]
    if event["type"] == "done":
        rate = event["timings"].get("generation_rate") if "timings" in event else None
        return f"{event['finish_reason']}: {event['usage']['completion_tokens']} tokens, {rate}"
    if event["type"] == "error":
        return f"{event['code']}: {event['message']}" + (", again" if event["retryable"] else "")
    return event["type"]


def generate(client: Client) -> str:
    job = client.generate("tiny", "Hi", max_tokens=5, stop=["."], json_schema={"type": "object"}, return_tokens=True)
    for event in job.stream(ping=1, cancel_on_exit=True):
        print(event["seq"] if event["type"] != "ping" else "…", text_of(event))
    result = job.result(timeout=60)
    best = result["logprobs"][0]["top"][0][1] if "logprobs" in result else 0.0
    print(len(result.get("context_tokens", [])), result.get("cache_hit_kind"))
    read = client.prefill("tiny", system="Hi", tools=[LOOK]).result()
    print(read["usage"].get("cache_tier"), client.generate("tiny", "!", parent_key=result.get("finish_key")).id)
    for prefix in client.cached_prefix("tiny", "Hi"):
        print(prefix["worker"], prefix["cached_tokens"], prefix["tier"], client.last_cache_hit("tiny"))
    return result["text"] + f"{result['usage']['prompt_tokens']} {best:.1f}"


def chat(client: Client) -> list[ChatMessage]:
    said: list[ChatMessage] = [{"role": "user", "content": "Look!"}]
    message = client.chat("tiny", said, tools=[LOOK], enable_thinking=True, parallel_tool_calls=False).result()[
        "message"
    ]
    for call in message.get("tool_calls", []):
        print(call["function"]["name"], call["id"])
    jobs = client.chat_many("tiny", [said, [*said, message]], temperature=0, idempotency_keys=["a", "b"])
    return [{"role": "assistant", "content": job.result()["text"]} for job in jobs]


def read(client: Client) -> float:
    ranked = client.rerank("tiny", "fox?", ["a", "b"], top_n=1).result()["results"]
    print(len(client.embed("tiny", ["a", "b"], dimensions=64).result()["embeddings"]))
    tokens = client.tokenize("tiny", "a", idempotency_key="1").result()["tokens"]
    print(client.embed("tiny", tokens).result(), client.embed("tiny", [tokens, tokens]).result())
    print(
        client.detokenize("tiny", tokens).result()["text"],
        client.apply_chat_template("tiny", chat(client), system="Hi").result(),
    )
    return ranked[0]["score"]


def look(client: Client) -> None:
    known: Job = client.job("an id")
    result: Result = known.result()
    position, stats = known.position(), client.stats()
    print(stats["totals"]["ram_evictions"] + stats["totals"]["prompt_rate"], stats["age_s"])
    print(result, position.state, position.eta_s, stats["eta_s"], [worker.name for worker in client.workers()])
    print([(dead["id"], dead["attempts"]) for dead in client.dead()], client.requeue_dead("an id").id)
    name = client.load_model(None, "bundled://tiny", n_parallel=4, threads="auto", sampling={"top_k": 3}, timeout=30)
    client.unload_model(name)
    summary = client.batch("in.jsonl", "out.jsonl", model="tiny", max_tokens=5, ordered=True)
    print(summary.state, summary.progress.failed)


def describe(client: Client) -> list[str]:
    models: list[ModelView] = client.models()
    adapters: list[AdapterView] = client.adapters(models[0]["id"])
    memory: list[MemoryView] = client.memory()
    lines = [f"{model['id']} {model['status']} {model.get('memory_bytes', 0) / 1e6:.0f} MB" for model in models]
    lines += [f"{adapter['name']} × {adapter['scale']} on {', '.join(adapter['workers'])}" for adapter in adapters]
    lines += [f"{device['name']}: {device['free_bytes']}" for worker in memory for device in worker["devices"]]
    lines += [f"{vram['used_bytes']} in use" for worker in memory if (vram := worker["vram"]) is not None]
    for worker in client.workers():
        lines.append(f"{worker.cores['uses']:.1f} of {len(worker.cores['processors'])}, {worker.memory['budget']}")
        lines += [failure["message"] for failure in worker.failures.values()]
        for model in worker.models:
            if model["embedder"] is not None:
                lines.append(f"{model['embedder']['texts_waiting']} texts wait, {worker.totals['phase']}")
            if model["engine"] is not None:
                lines.append(f"{model['engine']['slots_total']} slots, {model['engine']['generation_rate']:.0f} per s")
    return lines


def through_celery() -> float:
    greedy: tasks.GenerateParams = {"temperature": 0, "max_tokens": 5}
    job = tasks.generate.delay("tiny", "Hi", **greedy)
    jobs: list[tasks.QueuedJob[object]] = [job, tasks.embed.delay("tiny", ["a", "b"], dimensions=64)]
    said: ChatMessage = {"role": "user", "content": "Hi"}
    turn = tasks.chat.apply_async(("tiny", [said]), {"max_tokens": 5}, countdown=1.5, priority=9)
    jobs += [tasks.generate.apply_async(("tiny", "Hi"), greedy), tasks.generate.apply_async(kwargs={"model": "tiny"})]
    print([each.id for each in jobs if not each.ready()], turn.get(timeout=60)["message"]["content"], turn.state)
    print(job.get(timeout=60)["usage"]["cached_tokens"])
    return tasks.rerank.delay("tiny", "fox?", ["a", "b"], top_n=1).get()["results"][0]["score"]


async def elsewhere(url: str) -> str:
    async with AsyncClient(url) as client:
        job = await client.generate("tiny", "Hi", max_tokens=5, adapters={"pirate": 0.5})
        async for event in job.stream():
            print(text_of(event))
        jobs = await client.embed_many("tiny", [["a"], ["b"]], priority=9)
        print(len(jobs), (await client.stats())["slots_busy"])
        return (await job.result())["text"]


def main() -> None:
    with Client(url="redis://127.0.0.1:6379/0") as client:
        try:
            print(__version__, generate(client), read(client), describe(client), through_celery())
            look(client)
        except InvalidJob as error:
            print(error.code, error.http_status, error.exit_code)
        except JobFailed as error:
            print(error.code, error.message, error.retryable)
