"""Sign what models think, so that callers can send it back with a conversation (`reasoning_key`)."""

from __future__ import annotations

from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.contract.kinds.generate import GenerateJob
from cellama.tasks.contract.kinds.prefill import PrefillJob
from cellama.tasks.middleware import AttemptContext, Middleware
from cellama.tasks.publishing.signing import Signer

from .conversation import conversation_of


class SignReasoning(Middleware):
    """Gives each chat a signature that depends on the conversation before it. Without it signatures are empty."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer

    def before_request(self, attempt: AttemptContext, line: str, job: GenerateJob | ChatJob | PrefillJob) -> None:
        if isinstance(job, ChatJob):
            messages, options = conversation_of(job)
            attempt.sign[line] = self._signer.after(options.all_of(messages), job.parent_key).sign
