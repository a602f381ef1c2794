"""What is thought is signed with the conversation before it: of a job, and of each line of a bulk run."""

from __future__ import annotations

from cellama.engine import Finished, Text
from cellama.tasks.publishing.publisher import LINE_MARK, Publisher
from cellama.tasks.publishing.signing import Signer

from .memory_ledger import COMPLETION, MemoryLedger, attempt

SIGNER = Signer("a secret")
TURNS = [[{"role": "user", "content": text}] for text in ("Hi", "Ho")]


def test_thoughts_of_jobs_and_lines_are_signed_by_their_own_conversation() -> None:
    ledger = MemoryLedger()
    publisher = Publisher(ledger, "w", lambda *_: None, SIGNER)  # type: ignore[arg-type]
    ids = ["a#1", f"b#1{LINE_MARK}0", f"b#1{LINE_MARK}1"]
    for job_id in "ab":
        publisher.open(attempt(job_id))
    for request_id, turns in zip(ids, (TURNS[0], *TURNS), strict=True):
        publisher.sign_with(request_id, SIGNER.after(turns))
    tell = publisher.listener("tiny")
    tell(tuple(Text(request_id, "so", (1,), kind="reasoning_end") for request_id in ids))
    tell((Finished("a#1", COMPLETION),))
    assert publisher.close()
    told = [event["signature"] for job_id in "ab" for event in ledger.journal(job_id) if "signature" in event]
    assert told == [SIGNER.after(turns).sign("so") for turns in (TURNS[0], *TURNS)]
    assert len(set(told)) == 2
