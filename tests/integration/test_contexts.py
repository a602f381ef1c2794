"""Contexts in Redis are stored with the end of a job and found by their key, and damaged contexts are ignored."""

from __future__ import annotations

import random
import uuid

import pytest
from redis import Redis

from cellama.tasks.contract.keys import context_key
from cellama.tasks.state.contexts import KeptContext, keep_context, pack, pack_after, read_context
from cellama.tasks.state.ledger import Entry, Ledger

from .ledgers import DONE, STARTED, begin, write

MODEL, STORE_ID = "ab" * 32, b"an identity"


def context(num_tokens: int) -> KeptContext:
    randomly = random.Random(num_tokens)
    return KeptContext(MODEL, STORE_ID, [randomly.randrange(128_000) for _ in range(num_tokens)])


def new_key() -> str:
    return uuid.uuid4().hex * 2


@pytest.mark.parametrize("num_tokens", [0, 1, 1023, 1024, 30_000])
def test_context_round_trips(redis_client: Redis, num_tokens: int) -> None:
    key, kept = new_key(), context(num_tokens)
    keep_context(redis_client, key, kept, 600)
    found = read_context(redis_client, key, MODEL, 900)
    assert found is not None
    assert (found.model, found.identity, list(found.tokens)) == (MODEL, STORE_ID, kept.tokens)
    assert 600 < int(str(redis_client.ttl(context_key(key)))) <= 900  # a reader extends its expiry
    assert redis_client.strlen(context_key(key)) < 4 * num_tokens + 64
    other = read_context(redis_client, key, "cd" * 32, 900)
    assert other is not None
    assert other.model == ""


def test_existing_context_is_extended_instead_of_rewritten(redis_client: Redis) -> None:
    key, kept = new_key(), context(3)
    keep_context(redis_client, key, kept, 60)
    keep_context(redis_client, key, context(5), 600)
    found = read_context(redis_client, key, MODEL, 900)
    assert found is not None
    assert list(found.tokens) == kept.tokens


def test_contexts_are_stored_with_the_last_event(ledger: Ledger, job_id: str, redis_client: Redis) -> None:
    """Alternatives share one copy of the prompt, and a superseded attempt stores nothing."""
    first, second, kept = new_key(), new_key(), context(2000)
    other = KeptContext(MODEL, STORE_ID, [*kept.tokens[:1500], 1, 2, 3])
    contexts = ((context_key(first), pack(kept)), (context_key(second), pack_after(other, first, 1500)))
    old, attempt = begin(ledger, job_id), begin(ledger, job_id, alone=True)
    write(ledger, attempt, STARTED)
    assert ledger.write([Entry(job_id=job_id, run=old.run, event={"seq": 1, **DONE}, contexts=contexts)]) == (
        {0},
        set(),
    )
    assert read_context(redis_client, first, MODEL, 60) is None
    assert ledger.write([Entry(job_id=job_id, run=attempt.run, event={"seq": 1, **DONE}, contexts=contexts)]) == (
        set(),
        set(),
    )
    assert 3600 < int(str(redis_client.ttl(context_key(first)))) <= 86400
    found = [read_context(redis_client, key, MODEL, 86400) for key in (first, second)]
    assert [list(each.tokens) if each else None for each in found] == [kept.tokens, other.tokens]
    assert int(str(redis_client.strlen(context_key(second)))) < 200
    redis_client.delete(context_key(first))
    assert read_context(redis_client, second, MODEL, 60) is None


@pytest.mark.parametrize("value", [b"", b"\x01", b"\xff" * 100, b'{"a": 1}'])
def test_invalid_context_counts_as_missing(redis_client: Redis, value: bytes) -> None:
    key = new_key()
    redis_client.set(context_key(key), value, ex=60)
    assert read_context(redis_client, key, MODEL, 60) is None


def test_damaged_context_counts_as_missing_or_contains_different_tokens(redis_client: Redis) -> None:
    """A reader recomputes the key, so it detects wrong tokens and ignores them."""
    key, kept, randomly = new_key(), context(1500), random.Random(1)
    whole = pack(kept)
    for _ in range(300):
        damaged = bytearray(whole[: randomly.randrange(len(whole))])
        for _ in range(randomly.randrange(3)):
            damaged[randomly.randrange(len(damaged) or 1) : len(damaged)] = randomly.randbytes(4)
        redis_client.set(context_key(key), bytes(damaged), ex=60)
        found = read_context(redis_client, key, MODEL, 60)
        assert found is None or list(found.tokens) != kept.tokens
