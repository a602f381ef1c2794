"""Several workers write the record of a pool's desired state in a real Redis."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor

from redis import Redis

from cellama.config import ModelSettings
from cellama.tasks.contract.keys import desired_state_key
from cellama.tasks.worker.desired_state import RECORD_TTL_S, DesiredStateRecord, Override, model_key

KEY = model_key("big")


def source(record: DesiredStateRecord) -> str | None:
    found = record.read().get(KEY)
    return found[0].model.source if found is not None and found[0].model is not None else None


def test_concurrent_writes_leave_one_desired_state(redis_client: Redis) -> None:
    pool = f"p{uuid.uuid4().hex[:8]}"
    records = [DesiredStateRecord(redis_client, pool, f"w{number}@{pool}") for number in range(8)]

    def write(record: DesiredStateRecord) -> None:
        model = ModelSettings(id="big", source=f"{records.index(record)}.gguf")
        record.write(KEY, Override(model=model), whole_pool=True, before=b"")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, records))
    sources = {source(record) for record in records}
    assert len(sources) == 1
    assert None not in sources
    assert 0 < redis_client.ttl(desired_state_key("pool", pool)) <= RECORD_TTL_S
