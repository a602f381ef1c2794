"""Agents never compute a prefix twice: every turn reuses the KV state of the turn before it, for any chat template."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from typer.testing import CliRunner

from cellama.api.cli import app
from cellama.api.client.client import Client
from cellama.api.machine.redis_server import RedisServer
from cellama.bench.harness.scripted import SCRIPT_FILE
from cellama.tasks.contract.keys import reply_key, workers_key
from cellama.tasks.state.contexts import read_context

from ...agent_traces import AGENTS, FAMILIES, SCRIPT, Agent, Turn, check_turn, number_of, temperature_of, write_models
from ...conftest import EXAMPLES, WorkerProcess, wait_until
from ...gateways import GatewayProcess
from ..conftest import read

TURNS = min(40, 6 * EXAMPLES)
SHORT = ("hermes", "mistral", "deepseek-r1", "gpt-oss")  # the families that `make test` runs
MIN_REUSED = 0.97  # share of the previous turn's prompt and answer
APIS = list(AGENTS)


def start_agents(folder: Path, redis_url: str, name: str, prefix: str, *families: str, **settings: str) -> Any:
    models = write_models(folder, families, prefix)
    settings |= {"CELLAMA_MODELS": models, SCRIPT_FILE: str(folder / SCRIPT), "CELLAMA_LEASE_S": "3"}
    return WorkerProcess(folder, redis_url, name=f"{name}-{prefix}", **settings)


@pytest.fixture(scope="module")
def agents(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[WorkerProcess]:
    """A worker with a model for each family of the selected tests, and for those of `make test`."""
    selected = {item.callspec.params.get("family") for item in request.session.items if hasattr(item, "callspec")}
    families = [name for name in FAMILIES if name in selected or name in SHORT]
    process = start_agents(tmp_path_factory.mktemp("agents"), redis_server.url, "all", "agent", *families)
    yield process.wait_ready()
    assert process.stop() == 0, process.log()


def run(agent: Agent, turns: range, before: Turn | None = None) -> Turn:
    for i in turns:
        turn = agent.turn(i)
        check_turn(agent.family, i, turn)
        if before is not None:
            reused = turn.cached / (before.prompt + before.completion)
            print(f"{agent.family}, turn {i}: {reused:.4f} of the previous turn reused")
            assert reused >= MIN_REUSED, f"turn {i} after {before}: {turn}"
        before = turn
    assert before is not None
    return before


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize(
    ("family", "api"),
    [(family, api) for family in FAMILIES for api in APIS]
    if EXAMPLES > 1
    else [(family, APIS[i % 3]) for i, family in enumerate(SHORT)],
)
def test_every_turn_reuses_the_previous_turn(gateway: GatewayProcess, family: str, api: str) -> None:
    keeps_reasoning = list(FAMILIES).index(family) % 2 == 1
    run(AGENTS[api](gateway, "agent", family, keeps_reasoning), range(TURNS))


def started(redis: Redis, turn: Turn) -> dict[str, Any]:
    return read(redis, turn.job)[0].get("replay", {})


def prompt_of(redis: Redis, turn: Turn) -> list[int]:
    """Return the tokens of a turn's prompt."""
    context = read_context(redis, read(redis, turn.job)[-1]["finish_key"], "", 60)
    assert context is not None
    return list(context.tokens)[: turn.prompt]


@pytest.mark.usefixtures("agents")
def test_edited_history_is_sent_to_the_model_as_edited(
    gateway: GatewayProcess, queue: Client, redis_client: Redis
) -> None:
    agent = AGENTS["chat"](gateway, "agent", "hermes", keeps_reasoning=True, question="Which forest?")
    last = run(agent, range(4, 6))
    reply = agent.history[2]
    assert reply["content"] == "I have read part 4 of the forest."
    for name, text in (("content", "I burned part 4 of the forest."), ("reasoning_content", "The user wants smoke.")):
        history, agent.history = agent.history, [dict(message) for message in agent.history]
        agent.history[2][name] = text
        turn = agent.turn(6)
        agent.history = history
        assert (started(redis_client, turn)["cause"], started(redis_client, turn)["message"]) == ("reply", 2)
        shown = queue.detokenize("agent-hermes", prompt_of(redis_client, turn)).result(60)["text"]
        assert (text in shown) == (name == "content")  # the template omits the reasoning of earlier turns
        explained = queue.explain_cache(turn.job)
        assert (explained.cause, explained.message, explained.reused_tokens) == ("reply", 2, turn.cached)
        printed = CliRunner().invoke(app, ["cache", "explain", turn.job]).stdout
        assert f"{turn.cached} of {turn.prompt} prompt tokens were reused" in printed
        assert "messages.2: the client changed the reply of the assistant" in printed
        if name == "content":  # compared with the original conversation
            assert explained.difference is not None
            assert "burned" in str(explained.difference.prompt)
            assert "The user wants part 4" in str(explained.difference.earlier)
    run(agent, range(6, 7), before=last)


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize(("api", "prefix"), [("chat", "chatcmpl-"), ("messages", "msg_"), ("responses", "resp_")])
def test_cache_reuse_is_explained_for_an_answer_id(
    gateway: GatewayProcess, queue: Client, api: str, prefix: str
) -> None:
    agent = AGENTS[api](gateway, "agent", "hermes", keeps_reasoning=False, question=f"Which answer of {api}?")
    turn = run(agent, range(2))
    explained = queue.explain_cache(prefix + turn.job)
    assert (explained.prompt_tokens, explained.reused_tokens) == (turn.prompt, turn.cached)


@pytest.mark.usefixtures("agents")
def test_branches_and_retries_share_their_common_prefix(gateway: GatewayProcess) -> None:
    agent = AGENTS["messages"](gateway, "agent", "hermes", keeps_reasoning=False, question="Branch!")
    first = run(agent, range(3))
    history = list(agent.history)
    last = agent.turn(3)
    agent.history = history
    again = agent.turn(3)  # a retry
    assert (again.prompt, again.cached) == (last.prompt, last.prompt - 1)
    agent.history = history[:-1]
    agent.history.append({"role": "user", "content": [*history[-1]["content"], {"type": "text", "text": "Stop."}]})
    branch = agent.turn(4)
    assert branch.cached >= MIN_REUSED * (first.prompt + first.completion)
    other = AGENTS["messages"](gateway, "agent", "hermes", keeps_reasoning=False, question="Branch two!").turn(0)
    assert other.cached >= other.prompt - 20  # the system message and the tools


@pytest.mark.usefixtures("agents")
def test_replies_are_never_replayed_in_another_scope(queue: Client) -> None:
    number = number_of("hermes", 4)
    question = [{"role": "user", "content": "Whose forest?"}]
    params: Any = {"temperature": temperature_of(number), "return_tokens": True}
    first = queue.chat("agent-hermes", question, cache_scope="a", **params).result(60)
    turns: Any = [*question, {"role": "assistant", "content": first["text"]}, {"role": "user", "content": "And?"}]
    same, other = (
        queue.chat("agent-hermes", turns, cache_scope=scope, **params).result(60)["context_tokens"] for scope in "ab"
    )
    context = first["context_tokens"]
    assert same[: len(context)] == context
    assert other[: len(context)] != context  # rendered by the template, without the reasoning


@pytest.mark.usefixtures("agents")
def test_whole_conversation_reuses_the_reply_of_a_job_with_a_parent_key(queue: Client) -> None:
    turns: list[dict[str, Any]] = []
    reply: dict[str, Any] = {}
    for i in (4, 9, 14, 19):
        turns.append({"role": "user", "content": f"What is in part {i}?"})
        params: Any = {"temperature": temperature_of(number_of("hermes", i)), "return_tokens": True}
        if reply and i < 19:
            job = queue.chat("agent-hermes", turns[-1:], parent_key=reply["finish_key"], **params)
        else:
            job = queue.chat("agent-hermes", turns, **params)
        before, reply = reply, dict(job.result(60))
        assert reply["message"]["reasoning"]
        assert reply["context_tokens"][: len(before.get("context_tokens", ()))] == before.get("context_tokens", [])
        turns.append({"role": "assistant", "content": reply["text"]})  # without the reasoning


@pytest.mark.usefixtures("agents")
def test_template_renders_a_reply_whose_record_has_expired(gateway: GatewayProcess, redis_client: Redis) -> None:
    agent = AGENTS["messages"](gateway, "agent", "deepseek-r1", keeps_reasoning=False, question="Is it old?")
    run(agent, range(4, 6))
    for key in redis_client.scan_iter(reply_key("*")):
        redis_client.delete(key)
    turn = agent.turn(6)
    check_turn("deepseek-r1", 6, turn)
    assert started(redis_client, turn)["cause"] == "expired"
    run(agent, range(7, 9), before=turn)


def test_next_turn_reuses_the_cache_after_its_worker_was_killed(
    gateway: GatewayProcess, queue: Client, redis_server: RedisServer, redis_client: Redis, tmp_path: Path
) -> None:
    states: Any = {"CELLAMA_CACHE_DIR": str(tmp_path / "states")}
    first = start_agents(tmp_path, redis_server.url, "first", "killed", "hermes-opened", **states).wait_ready()
    agent = AGENTS["messages"](gateway, "killed", "hermes-opened", keeps_reasoning=False)
    before = run(agent, range(6))
    tokens = prompt_of(redis_client, before)

    def is_on_disk() -> bool:
        (found,) = queue.cached_prefix("killed-hermes-opened", tokens)
        return found["tiers"]["disk"] >= len(tokens) - 1

    wait_until(is_on_disk, "the state on disk")
    first.process.kill()
    first.process.wait()
    second = start_agents(tmp_path, redis_server.url, "second", "killed", "hermes-opened", **states)
    try:
        second.wait_ready()
        for name in redis_client.hkeys(workers_key()):  # the entry of a killed worker would disturb other tests
            if name.startswith(b"first-killed"):
                redis_client.hdel(workers_key(), name)
        run(agent, range(6, 7), before=before)
    finally:
        assert second.stop() == 0, second.log()
