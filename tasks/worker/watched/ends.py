"""How attempts end, in one word."""

from __future__ import annotations

from celery.exceptions import Ignore, Reject

from cellama.tasks.broker.pool import Interruption


def end_of(error: BaseException | None, interruption: Interruption | None) -> str:
    """By what Celery hears: an Ignore says only that it has heard already, or that another attempt tells it."""
    if error is None:
        return "success"
    if interruption is Interruption.HANDED_BACK:
        return "handed_back"
    if not isinstance(error, Ignore | Reject) or interruption is Interruption.HARD_LIMIT:
        return "failure"
    return "revoked" if interruption is Interruption.CANCELLED else "superseded"
