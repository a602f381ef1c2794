"""Chats whose earlier reply is rendered again instead of replayed, and the explanation of `cellama cache explain`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cellama.api import Client
from cellama.api.cli import app
from cellama.api.client.cache_explanation import REASONS, CacheExplanation
from cellama.api.machine.redis_server import RedisServer
from cellama.bench.models.templated import write_templated

from ..conftest import PATIENCE_S
from .conftest import GREEDY, StartWorker

LOUD = (  # does not reproduce replies unchanged
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content | upper if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Client]:
    with Client() as client:
        yield client


def explained(client: Client, model: str, question: str = "Which forest?") -> CacheExplanation:
    """Return the explanation for the second turn of a conversation."""
    turns = [{"role": "user", "content": question}]
    first = client.chat(model, turns, max_tokens=8, **GREEDY).result(PATIENCE_S)
    turns += [{"role": "assistant", "content": first["text"]}, {"role": "user", "content": "And then?"}]
    job = client.chat(model, turns, max_tokens=4, **GREEDY)
    assert job.result(PATIENCE_S)["usage"]["completion_tokens"] > 0
    found = client.explain_cache(job.id)
    printed = " ".join(CliRunner().invoke(app, ["cache", "explain", job.id]).stdout.split())
    assert found.cause is None or REASONS[found.cause] in printed
    return found


def test_reply_is_replayed_by_default(client: Client, model: str, start_worker: StartWorker) -> None:
    start_worker()
    found = explained(client, model)
    assert (found.cause, found.replayed_messages) == (None, 2)


def test_reply_is_rendered_when_the_setting_disables_replays(
    client: Client, model: str, start_worker: StartWorker
) -> None:
    start_worker(replay_replies="false")
    found = explained(client, model)
    assert (found.cause, found.replayed_messages) == ("disabled", 0)
    assert 0 < found.reused_tokens < found.prompt_tokens  # the rendered question is the same


def test_reply_is_rendered_when_replayed_turns_leave_no_room(
    client: Client, model: str, start_worker: StartWorker
) -> None:
    start_worker()
    found = explained(client, model, question="fox " * 1600)  # tokens, of 2,048 in a slot
    assert (found.cause, found.replayed_messages) == ("no_room", 0)
    assert found.reused_tokens > 1600


def test_reply_is_rendered_when_the_template_changes_replies(
    client: Client, model: str, start_worker: StartWorker, tmp_path: Path
) -> None:
    write_templated(tmp_path / "loud.gguf", LOUD)
    start_worker(source=str(tmp_path / "loud.gguf"))
    found = explained(client, model)
    assert (found.cause, found.replayed_messages) == ("template", 0)
