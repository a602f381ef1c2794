"""The console's chat over HTTP: its answers, its errors, its limits, and its privacy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from cellama.api.client.client import Client
from cellama.api.http.auth import Caller
from cellama.api.http.console.chat_store import MAX_CHATS, ChatTurn, ConsoleChatStore
from cellama.api.keys.entry import KeyEntry, new_key
from cellama.api.keys.managing import as_toml
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.contract.keys import console_chat_key, console_chats_key, journal_key

from ...conftest import PATIENCE_S, WorkerProcess, wait_until
from ...gateways import GatewayProcess
from .console_chats import ConsoleChatter

HOSTILE = "<script>document.title='owned'</script>\x1b[2J\u202eevil\u2066 &amp; <img src=x onerror=alert(1)>"


@pytest.fixture
def chatter(gateway: GatewayProcess, redis_client: Redis) -> Iterator[ConsoleChatter]:
    with ConsoleChatter(gateway.url) as chatter:
        yield chatter
    redis_client.delete(console_chat_key("", chatter.id))
    redis_client.zrem(console_chats_key(""), chatter.id)


def store_running_turn(redis_server: RedisServer, chatter: ConsoleChatter, job_id: str) -> None:
    """Make a job the last answer of the chat."""

    async def write() -> None:
        async with AsyncRedis.from_url(redis_server.url) as redis:
            turn = ChatTurn(text="Hi", model="tiny", job_id=job_id)
            store = ConsoleChatStore(redis, Caller())
            await store.update(chatter.id, lambda chat: chat.with_turn(turn))

    asyncio.run(write())
    chatter.num_turns = 1


def test_chat_continues_and_stores_the_conversation(chatter: ConsoleChatter, redis_client: Redis) -> None:
    assert chatter.send("What is the capital of France?").status_code == 200
    first = chatter.answer()
    assert (first["type"], first["status"], "Paris" in first["answer"]) == ("end", "done", True)
    assert chatter.send("And again?", system="Be brief", max_tokens=3).status_code == 200
    second = chatter.answer()
    assert "maximum number of tokens" in second["note"]
    page = chatter.page()
    assert all(text in page for text in (first["answer"], second["answer"], "And again?", "Be brief"))
    assert chatter.id in chatter.page("/console/chat")
    assert redis_client.ttl(console_chat_key("", chatter.id)) > 29 * 86_400


def test_answer_continues_when_its_reader_disconnects(
    chatter: ConsoleChatter, worker: WorkerProcess, jobs_of_test: Callable[[], list[str]]
) -> None:
    with worker.slowed(0.1):
        chatter.send("Tell a story about foxes", max_tokens=40)
        seen = [event for event, _ in zip(chatter.events(), range(6), strict=False)]
        assert len(jobs_of_test()) == 1
    assert seen[-1]["type"] == "token"
    rest = list(chatter.events(after=seen[-1]["seq"]))
    assert rest[-1]["type"] == "end"
    numbers = [event["seq"] for event in seen + rest if "seq" in event]
    assert numbers == list(range(len(numbers)))
    text = "".join(event["text"] for event in seen + rest if event["type"] == "token")
    assert text == rest[-1]["answer"]
    assert text in chatter.page().replace("&#34;", '"').replace("&#39;", "'")


def test_stopped_answer_keeps_its_text(chatter: ConsoleChatter, worker: WorkerProcess) -> None:
    with worker.slowed(0.1):
        chatter.send("Tell a story about foxes")
        events = chatter.events()
        seen = [next(events) for _ in range(4)]
        assert chatter.http.post(f"{chatter.path}/stop").status_code == 204
        *_, end = events
    assert (end["status"], end["note"]) == ("stopped", "You stopped this answer.")
    assert end["answer"].startswith("".join(event["text"] for event in seen if event["type"] == "token"))
    chatter.send("", retry=True, max_tokens=4)
    assert chatter.answer()["status"] == "done"
    assert chatter.page().count('class="turn"') == 2  # the answer that replaced it, and the template


def test_rejected_message_changes_nothing(chatter: ConsoleChatter, redis_client: Redis) -> None:
    def refusal(text: str, **fields: Any) -> tuple[int, str]:
        response = chatter.send(text, **fields)
        return response.status_code, response.json()["error"]["message"]

    status, message = refusal("Hi", model="no such model")
    assert (status, "tiny" in message) == (404, True)
    assert refusal("Hi", temperature=-1)[0] == 400
    assert refusal(" ")[0] == 400
    assert refusal("x" * (2 << 20))[0] == 413
    assert refusal("Hi", retry=True)[0] == 409
    assert refusal("Hi", num_turns=3)[0] == 409
    assert redis_client.exists(console_chat_key("", chatter.id)) == 0
    assert chatter.http.get(chatter.path, headers={"accept": "text/html"}).status_code == 404


def test_failed_answer_shows_a_remedy_and_can_be_requested_again(chatter: ConsoleChatter) -> None:
    chatter.send("fox " * 9000)
    failed = chatter.answer()
    assert (failed["status"], "tokens" in failed["note"]) == ("failed", True)
    chatter.send("What is the capital of France?")
    assert "Paris" in chatter.answer()["answer"]  # the failed message is not part of the prompt


def test_hostile_text_is_escaped_and_visible(chatter: ConsoleChatter, queue: Client, redis_server: RedisServer) -> None:
    job = queue.chat("tiny", [{"role": "user", "content": "Hi"}], grammar=f"root ::= {gbnf(HOSTILE)}", max_tokens=500)
    store_running_turn(redis_server, chatter, job.id)
    streamed = "".join(event["text"] for event in chatter.events() if event["type"] == "token")
    shown = HOSTILE.replace("\x1b", "␛").replace("\u202e", "[U+202E]").replace("\u2066", "[U+2066]")
    assert streamed == chatter.answer()["answer"] == shown
    page = chatter.page()
    assert "<script>document" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;document" in page
    job_page = chatter.page(f"/console/jobs/{job.id}")
    assert "[U+202E]evil" in job_page
    assert not any(char in page + job_page for char in "\x1b\u202e\u2066")


def gbnf(text: str) -> str:
    """Return the text as a terminal of a GBNF grammar."""
    return '"' + "".join(char if char.isalnum() else f"\\u{ord(char):04x}" for char in text) + '"'


def test_answer_of_a_lost_job_fails_with_a_remedy(chatter: ConsoleChatter, redis_server: RedisServer) -> None:
    store_running_turn(redis_server, chatter, "no-such-job")
    end = chatter.answer()
    assert (end["status"], end["note"].endswith("Retry.")) == ("failed", True)
    assert chatter.send("", retry=True, max_tokens=4).status_code == 200
    assert chatter.answer()["status"] == "done"


def test_answer_comes_from_the_result_when_its_events_have_expired(
    chatter: ConsoleChatter, queue: Client, redis_client: Redis, redis_server: RedisServer
) -> None:
    job = queue.chat("tiny", [{"role": "user", "content": "What is the capital of France?"}], temperature=0)
    text = job.result(PATIENCE_S)["message"]["content"]
    redis_client.delete(journal_key(job.id))
    store_running_turn(redis_server, chatter, job.id)
    end = chatter.answer()
    assert (end["status"], end["answer"]) == ("done", text)
    assert text in chatter.page()


def test_oldest_chats_are_deleted_when_a_caller_has_too_many_chats(redis_server: RedisServer) -> None:
    async def run() -> None:
        async with AsyncRedis.from_url(redis_server.url) as redis:
            store = ConsoleChatStore(redis, Caller(key_id="many"))
            turn = ChatTurn(text="Hi", model="tiny", job_id="a", status="done")
            for number in range(MAX_CHATS + 3):
                await store.update(f"{number:032x}", lambda chat: chat.with_turn(turn))
            kept = [int(entry.id, 16) for entry in await store.list()]
            assert kept == list(range(MAX_CHATS + 2, 2, -1))
            assert await store.read(f"{0:032x}") is None
            for number in kept:
                await store.delete(f"{number:032x}")
            assert await store.list() == []

    asyncio.run(run())


@pytest.fixture
def keyed(redis_server: RedisServer, worker: WorkerProcess, tmp_path: Path) -> Iterator[tuple[str, str, str]]:
    """A gateway with two keys of one tenant, of which one may not use the model: its URL and the keys."""
    keys, entries = [new_key(), new_key()], []
    for key, models in zip(keys, (None, ["other"]), strict=True):
        entries.append(KeyEntry(id=key.id, digest=key.digest, tenant="acme", models=models, requests_per_minute=60))
    (tmp_path / "keys.toml").write_text("\n".join(map(as_toml, entries)))
    gateway = GatewayProcess(tmp_path, redis_server.url, CELLAMA_GATEWAY_KEYS_FILE=str(tmp_path / "keys.toml"))
    yield gateway.wait_ready("/health").url, keys[0].text, keys[1].text
    assert gateway.stop() == 0


def test_chat_belongs_to_its_key_and_has_the_rights_of_the_key(
    keyed: tuple[str, str, str], redis_client: Redis
) -> None:
    url, first, second = keyed
    own, other = ConsoleChatter(url, **{"x-api-key": first}), ConsoleChatter(url, **{"x-api-key": second})
    with own, other:
        assert own.send("Hi", max_tokens=4).status_code == 200
        assert own.answer()["status"] == "done"
        other.path = own.path
        for path in (own.path, f"{own.path}/stream"):
            assert other.http.get(path).status_code == 404
        assert own.id not in other.page("/console/chat")
        refused = other.send("Hi")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
        assert httpx.get(f"{url}{own.path}/stream").status_code == 401
        assert own.http.post(f"{own.path}/stop", headers={"origin": "https://evil.example"}).status_code == 403
        assert own.http.post(f"{own.path}/delete").status_code == 303
        assert own.http.get(own.path).status_code == 404
        keys = f"cellama:key:admissions:{first.split('-')[1]}"
        wait_until(lambda: redis_client.zcard(keys) == 1, "the charge of one request")  # reading charges nothing
