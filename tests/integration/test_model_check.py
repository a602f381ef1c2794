"""The rules of docs/delivery.md hold for any order of steps of workers, reapers and producers on a real Redis.

No step waits, because the clock of the scripts is a key that the test moves. To roll Redis back, a snapshot is
restored. A job's k-th token is the number k, which makes gaps, duplicates and mixtures in a stream visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies as st

from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.state import scripts

from ..conftest import EXAMPLES
from .delivery_steps import CLOCK, Delivery, MovedRedis, redis_of_test

# The steps, repeated according to their frequency.
STEPS = [
    *["submit"] * 3,
    *["take"] * 6,
    *["begin"] * 6,
    *["write"] * 8,
    *["pass_time"] * 4,
    *["lose", "cancel", "die", "die", "end_and_die", "hand_back", "freeze_or_thaw", "freeze_or_thaw"],
    *["expire_journal", "cut_off", "remember", "remember", "roll_back", "roll_back"],
]


@pytest.fixture(scope="module", autouse=True)
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    source = scripts.source
    own = "local time = {redis.call('GET', '" + CLOCK + "') or 0, 0}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripts, "source", lambda name: source(name).replace("local time = redis.call('TIME')", own))
        scripts._script_with.cache_clear()
        folder: Path = tmp_path_factory.mktemp("redis")
        with RedisServer.start(folder) as server, MovedRedis.from_url(server.url) as client:
            redis_of_test.append(client)
            yield
            redis_of_test.clear()
    scripts._script_with.cache_clear()


def scenario(text: str) -> list[tuple[str, int]]:
    """Parse steps, such as "take 0, write 1"."""
    return [(step, int(number)) for step, number in (part.split() for part in text.split(","))]


BEGUN = "submit 1, take 0, begin 0, write 0"
FAILOVER = f"{BEGUN}, remember 0, write 0, write 0, roll_back 0, write 0"
TAKEN_OVER = f"{BEGUN}, freeze_or_thaw 0, pass_time 11, take 1, begin 1, write 1, freeze_or_thaw 0, write 0, begin 0"
FORGOTTEN = (
    "submit 1, remember 0, take 0, begin 0, write 0, write 0, freeze_or_thaw 0, roll_back 0, take 1, begin 1, "
    "write 1, write 1, freeze_or_thaw 0, write 0, write 1"
)
EXPIRED = f"{BEGUN}, write 0, hand_back 0, expire_journal 0, take 0, begin 0, write 0"
COPIED = "submit 1, lose 2, submit 1, pass_time 11, pass_time 11, take 0, take 1, begin 1, begin 0, write 0, write 1"


@example(scenario(FAILOVER))
@example(scenario(TAKEN_OVER))
@example(scenario(FORGOTTEN))
@example(scenario(COPIED))
@example(scenario(EXPIRED))
@settings(max_examples=60 * EXAMPLES)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 11)), min_size=25, max_size=60))
def test_every_sequence_of_failures_ends_each_job_once_with_a_complete_stream(steps: list[tuple[str, int]]) -> None:
    delivery = Delivery()
    for step, number in steps:
        getattr(delivery, step)(number)
        delivery.streams_are_whole()
        delivery.somebody_looks_after_each_job()
        delivery.limit_is_kept()
    delivery.finish()
