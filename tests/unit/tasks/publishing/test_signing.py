"""The reasoning of a job, or of a line of a bulk run, is signed together with the conversation before it."""

from __future__ import annotations

from typing import Any

from cellama.engine import Finished, Text
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.publishing.publisher import LINE_MARK
from cellama.tasks.worker.signing import Signer, SignReasoning

from ..attempt_contexts import context
from .memory_ledger import COMPLETION, MemoryLedger, publisher_of

SIGNER = Signer("a secret")
TURNS: list[list[Any]] = [[{"role": "user", "content": text}] for text in ("Hi", "Ho")]


def test_reasoning_of_jobs_and_lines_is_signed_with_their_conversations() -> None:
    ledger, middleware = MemoryLedger(), SignReasoning(SIGNER)
    publisher = publisher_of(ledger)
    requests = {"a#1": TURNS[0], f"b#1{LINE_MARK}0": TURNS[0], f"b#1{LINE_MARK}1": TURNS[1]}
    contexts = {job_id: context(job_id) for job_id in "ab"}
    for job_id, made in contexts.items():
        publisher.open_job(job_id, sign=made.sign)
    for request_id, turns in requests.items():
        line = request_id.partition(LINE_MARK)[2]
        middleware.before_request(contexts[request_id[0]], line, ChatJob(model="m", messages=turns))
    report = publisher.listener("tiny")
    report(tuple(Text(request_id, "so", (1,), kind="reasoning_end") for request_id in requests))
    report((Finished("a#1", COMPLETION),))
    assert publisher.close()
    signatures = [event["signature"] for job_id in "ab" for event in ledger.journal(job_id) if "signature" in event]
    assert signatures == [SIGNER.after(turns).sign("so") for turns in requests.values()]
    assert len(set(signatures)) == 2
