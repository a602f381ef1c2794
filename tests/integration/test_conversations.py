"""Conversations continue by parent keys on a real worker, with exactly the same tokens, and never across scopes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import chain
from redis import Redis
from typer.testing import CliRunner

from cellama.api import Client, InvalidJob, JobFailed, UnknownModel
from cellama.api.cli import app
from cellama.engine import Context
from cellama.tasks import chat, generate, prefill
from cellama.tasks.contract.codes import Exit
from cellama.tasks.contract.keys import context_key, job_key
from cellama.tasks.state.contexts import KeptContext, keep_context

from ..conftest import PATIENCE_S
from .conftest import GREEDY, STORY

EventsOf = Callable[..., list[dict[str, Any]]]
pytestmark = pytest.mark.usefixtures("worker")
QUESTIONS = ("What is the capital of France?", "And of Norway?", "What do bees make?", "Who are you?")
HEAD = "The little fox lived in a green forest, and every day it went to the river to talk to the frogs. " * 3


def run(task: Any, *args: Any, **params: Any) -> Any:
    return task.delay("tiny", *args, **{**GREEDY, **params}).get(timeout=PATIENCE_S)


def tokens_of(result: Any) -> tuple[list[int], list[int]]:
    """Return the tokens of the prompt and of the generated text."""
    num_prompt = result["usage"]["prompt_tokens"]
    return result["context_tokens"][:num_prompt], result["tokens"]


def test_conversation_with_parent_keys_equals_the_same_conversation_with_token_ids() -> None:
    key, before = None, []
    for question in QUESTIONS:
        turn = [{"role": "user", "content": question}]
        result = run(chat, turn, parent_key=key, return_tokens=True, max_tokens=40)
        prompt, said = tokens_of(result)
        assert prompt[: len(before)] == before
        whole = run(generate, prompt, cache_prompt=False, return_tokens=True, max_tokens=40)
        assert whole["tokens"] == said
        assert "finish_key" not in whole
        assert key is None or result["usage"]["cached_tokens"] >= len(before) - 1
        key, before = result["finish_key"], result["context_tokens"]


def test_second_turn_has_the_same_tokens_as_the_rendered_conversation() -> None:
    turns = [{"role": "user", "content": question} for question in QUESTIONS[:2]]
    first = run(chat, turns[:1])
    by_key = run(chat, turns[1:], parent_key=first["finish_key"], return_tokens=True)
    by_messages = run(chat, [turns[0], first["message"], turns[1]], return_tokens=True)
    assert by_key["context_tokens"] == by_messages["context_tokens"]
    assert by_key["finish_key"] == by_messages["finish_key"]  # the key depends only on the tokens


def test_text_continues_from_finish_keys_in_results_events_and_choices(events_of: EventsOf) -> None:
    job = generate.delay("tiny", STORY, max_tokens=12, n=2, return_tokens=True)
    result = job.get(timeout=PATIENCE_S)
    assert events_of(job.id)[-1]["finish_key"] == result["finish_key"]
    assert result["choices"][0]["finish_key"] == result["finish_key"]
    for choice in result["choices"]:
        more = run(generate, [7, 8], parent_key=choice["finish_key"], max_tokens=4, return_tokens=True)
        prompt, _ = tokens_of(more)
        assert prompt == [*tokens_of(result)[0], *choice["tokens"], 7, 8]
        assert (more["usage"]["cache_tier"], more["usage"]["cache_hit_kind"]) == ("device", more["cache_hit_kind"])


def test_chain_step_continues_the_text_of_the_previous_step() -> None:
    first = generate.s("tiny", STORY, max_tokens=8, **GREEDY)
    steps = chain(first, generate.s(model="tiny", prompt=[5], max_tokens=8, return_tokens=True, **GREEDY))
    last = steps.apply_async().get(timeout=PATIENCE_S)
    so_far = run(generate, STORY, max_tokens=8, return_tokens=True)["context_tokens"]
    assert tokens_of(last)[0] == [*so_far, 5]


def test_parent_key_of_another_scope_is_treated_as_unknown() -> None:
    key = run(generate, STORY, max_tokens=4, cache_scope="a")["finish_key"]
    assert run(generate, " and", parent_key=key, max_tokens=1, cache_scope="a")["usage"]["cached_tokens"] > 0
    told = set()
    for asked, scope in ((key, "b"), (key, ""), ("0" * 64, "b"), (key[::-1], "b")):
        with pytest.raises(JobFailed) as failed:
            run(generate, " and", parent_key=asked, cache_scope=scope)
        assert failed.value.code == "unknown_key"
        told.add(str(failed.value).replace(asked, "KEY").replace(repr(scope), "SCOPE"))
    assert len(told) == 1
    assert "without parent_key" in told.pop()


def kept_elsewhere(redis: Redis, fingerprint: str, scope: str = "") -> tuple[str, list[int]]:
    """Store a context in Redis, as a worker with another KV cache type does, and return its key and tokens."""
    identity, tokens = b"of other types of cells", tuple(range(300, 360))
    key = Context(identity, (), scope, tokens).key
    keep_context(redis, key, KeptContext(fingerprint, identity, tokens), 60)
    return key, list(tokens)


def test_context_is_prefilled_again_when_the_kv_cache_type_has_changed(client: Client, redis_client: Redis) -> None:
    (model,) = [model for model in client.models() if model["id"] == "tiny"]
    key, tokens = kept_elsewhere(redis_client, model["fingerprint"], "cells")
    result = run(generate, " and", parent_key=key, cache_scope="cells", return_tokens=True, max_tokens=4)
    prompt, _ = tokens_of(result)
    assert (prompt[: len(tokens)], result["usage"]["cached_tokens"]) == (tokens, 0)
    assert run(generate, prompt, cache_prompt=False, max_tokens=4)["text"] == result["text"]
    with pytest.raises(JobFailed) as failed:
        run(generate, " and", parent_key=key, cache_scope="another")
    assert failed.value.code == "unknown_key"


def test_context_of_a_different_model_with_the_same_id_is_rejected(redis_client: Redis) -> None:
    key, _ = kept_elsewhere(redis_client, "cd" * 32)
    with pytest.raises(JobFailed, match=r"earlier model 'tiny'.*send the whole prompt") as failed:
        run(generate, " and", parent_key=key)
    assert failed.value.code == "unknown_key"


def test_bulk_lines_continue_from_their_parent_keys(client: Client, tmp_path: Path) -> None:
    heads = [run(generate, f"{STORY} {name}", max_tokens=4, return_tokens=True) for name in ("fox", "cat")]
    keys = [*(head["finish_key"] for head in heads), "0" * 64]
    lines = [{"id": str(i), "prompt": " and", "parent_key": key} for i, key in enumerate(keys)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = client.batch(source, target, model="tiny", ordered=True, max_tokens=5, **GREEDY)
    assert (summary.state, summary.progress.finished, summary.progress.failed) == ("completed", 2, 1)
    assert summary.errors is not None
    assert json.loads(summary.errors.read_text())["error"]["code"] == "unknown_key"
    told = [json.loads(line) for line in target.read_text().splitlines()]
    for head, line in zip(heads, told, strict=True):
        assert line["usage"]["prompt_tokens"] > len(head["context_tokens"])
        alone = run(generate, " and", parent_key=head["finish_key"], max_tokens=5)
        assert (line["text"], line["finish_key"]) == (alone["text"], alone["finish_key"])


@pytest.mark.parametrize("key", ["", "ab", "AB" * 32, "ab" * 32 + "\n", 7, {"text": "x", "finish_reason": "stop"}])
def test_malformed_parent_key_is_rejected_before_queueing(key: Any) -> None:
    with pytest.raises(InvalidJob, match="parent_key"):
        generate.delay("tiny", "Hi", parent_key=key)


def test_system_message_after_a_conversation_is_rejected() -> None:
    with pytest.raises(InvalidJob, match="parent_key has already started"):
        chat.delay("tiny", [{"role": "user", "content": "Hi"}], system="Be brief.", parent_key="ab" * 32)


def test_context_expires_with_the_result(redis_client: Redis, events_of: EventsOf) -> None:
    job = generate.apply_async(("tiny", STORY), {"max_tokens": 3}, ignore_result=True)
    key = context_key(events_of(job.id)[-1]["finish_key"])
    assert 86000 < int(str(redis_client.ttl(key))) <= 86400
    redis_client.delete(key)  # the engine that computed the context stores it again for later attempts
    run(generate, " and", parent_key=key.rpartition(":")[2], max_tokens=1)
    assert int(str(redis_client.ttl(key))) > 86000


def test_prefilled_prefix_is_reused(client: Client) -> None:
    job = client.prefill("tiny", HEAD, cache_scope="prefill")
    read = job.result(timeout=PATIENCE_S)
    assert (read["finish_reason"], read["usage"]["completion_tokens"], read["cache_hit_kind"]) == ("length", 0, "cold")
    assert [event["type"] for event in job.stream()] == ["started", "done"]
    (prefix,) = client.cached_prefix("tiny", HEAD + "Then", cache_scope="prefill")
    assert prefix["cached_tokens"] >= read["usage"]["prompt_tokens"] - 2
    assert (prefix["tier"], prefix["prompt_tokens"] > prefix["cached_tokens"]) == ("device", True)
    assert client.cached_prefix("tiny", HEAD, cache_scope="another")[0]["cached_tokens"] == 0
    more = run(generate, "Then", parent_key=read["finish_key"], cache_scope="prefill", max_tokens=3)
    assert more["usage"]["cached_tokens"] >= read["usage"]["prompt_tokens"] - 1
    again = client.prefill("tiny", HEAD, cache_scope="prefill").result(timeout=PATIENCE_S)
    assert again["finish_key"] == read["finish_key"]


def test_chats_reuse_the_prefilled_system_message() -> None:
    read = prefill.delay("tiny", system=HEAD).get(timeout=PATIENCE_S)["usage"]
    result = run(chat, [{"role": "user", "content": "Hi"}], system=HEAD, max_tokens=2)
    assert result["usage"]["cached_tokens"] >= read["prompt_tokens"] - 1
    assert result["usage"]["prompt_tokens"] > read["prompt_tokens"]


def test_cached_prefix_rejects_invalid_arguments(client: Client) -> None:
    with pytest.raises(UnknownModel):
        client.cached_prefix("no such model", "Hi")
    with pytest.raises(InvalidJob, match="pass either prompt"):
        client.cached_prefix("tiny")
    with pytest.raises(JobFailed, match="limit is 100000"):
        client.cached_prefix("tiny", "x" * 100_001)
    with pytest.raises(JobFailed, match="parent_key"):
        client.cached_prefix("tiny", "x", parent_key="ab" * 32)
    hits = client.last_cache_hit("tiny")
    assert set() < hits.keys() <= {worker.name for worker in client.workers()}  # a killed worker is still listed


def test_command_line_prefills_and_continues_a_context() -> None:
    command = ["prefill", "tiny", HEAD, "--cache-scope", "cli"]
    told = CliRunner().invoke(app, [*command, "--json"])
    read = json.loads(told.stdout)
    assert (told.exit_code, read["usage"]["completion_tokens"]) == (0, 0)
    again = CliRunner().invoke(app, command).stdout
    tokens = read["usage"]["prompt_tokens"]
    assert again == f"prefilled {tokens} tokens ({tokens - 1} were cached)\n{read['finish_key']}\n"
    after = ["generate", "tiny", "Then", "--parent-key", read["finish_key"], "--json", "--max-tokens", "2"]
    events = [
        json.loads(line) for line in CliRunner().invoke(app, [*after, "--cache-scope", "cli"]).stdout.splitlines()
    ]
    assert events[-1]["usage"]["cached_tokens"] >= tokens - 1
    assert events[-1]["finish_key"] != read["finish_key"]
    refused = CliRunner().invoke(app, after)
    assert isinstance(refused.exception, JobFailed)
    assert refused.exception.exit_code == Exit.USAGE


def test_prompts_passed_by_keyword_are_not_shown_in_flower(client: Client, redis_client: Redis, unserved: str) -> None:
    said = [{"role": "user", "content": "a secret"}]
    calls: list[dict[str, Any]] = [{"prompt": "a secret"}, {"messages": said}, {"system": "a secret"}]
    jobs = [client.prefill(unserved, wait=True, cache_scope="told", **call) for call in calls]
    jobs.append(client.chat(unserved, said, wait=True, system="a secret", cache_scope="told"))
    for job in jobs:
        headers = json.loads(redis_client.hget(job_key(job.id), "message"))["headers"]
        assert "secret" not in json.dumps(headers)
        assert "told" in headers["kwargsrepr"]
        job.cancel()
