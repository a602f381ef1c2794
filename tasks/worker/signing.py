"""Sign the reasoning in replies, so that workers detect when a client changes the reasoning or earlier messages."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cellama.engine import ChatOptions, Message
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.contract.kinds.generate import GenerateJob
from cellama.tasks.contract.kinds.prefill import PrefillJob
from cellama.tasks.contract.kinds.tokens import TemplateJob
from cellama.tasks.contract.payloads import RepliedJob
from cellama.tasks.middleware import AttemptContext, Middleware

_SIGNED = ("role", "content", "tool_calls", "tool_call_id", "name")  # fields of the messages before the reasoning


class Signer:
    """Signs texts with HMAC-SHA256. Without a key, all signatures are empty, and no signature is accepted."""

    def __init__(self, key: str | None, conversation: str = "") -> None:
        """Create a signer with this key. `conversation` is a digest of the messages before the reasoning."""
        self._key = key or None
        self._conversation = conversation

    @property
    def has_key(self) -> bool:
        """Return whether the signer has a key. Without a key, its signatures are empty."""
        return self._key is not None

    def after(self, messages: Sequence[Mapping[str, Any]], parent_key: str | None = None) -> Signer:
        """Return a signer for reasoning that follows these messages.

        The signatures are valid only after these messages. `parent_key` is the key of the context that the messages
        continue.
        """
        if self._key is None:
            return self
        digest = hashlib.sha256(_parent_line(parent_key))
        for message in messages:
            digest.update(_message_line(message))
        return Signer(self._key, digest.hexdigest())

    def first_wrong(self, messages: Sequence[Mapping[str, Any]], parent_key: str | None = None) -> int | None:
        """Return the index of the first message whose reasoning does not match its signature, or None if all match."""
        digest = hashlib.sha256(_parent_line(parent_key))
        for index, message in enumerate(messages):
            signature, signer = message.get("signature"), Signer(self._key, digest.hexdigest())
            if signature and not signer.verifies(message.get("reasoning") or "", signature):
                return index
            digest.update(_message_line(message))
        return None

    def sign(self, text: str) -> str:
        """Return the signature of a text as hexadecimal digits, or "" if there is no key."""
        if self._key is None:
            return ""
        return hmac.new(self._key.encode(), f"{self._conversation}\n{text}".encode(), hashlib.sha256).hexdigest()

    def verifies(self, text: str, signature: str) -> bool:
        """Return whether the signature is valid for the text."""
        return self._key is not None and hmac.compare_digest(self.sign(text).encode(), signature.encode())


def _parent_line(parent_key: str | None) -> bytes:
    """Return the bytes that are hashed before the messages, and that differ from the bytes of any message."""
    return b"" if parent_key is None else f"after {json.dumps(parent_key)}\n".encode()


def _message_line(message: Mapping[str, Any]) -> bytes:
    """Return a message as bytes, without its reasoning.

    Missing content is treated as empty content, as in templates.
    """
    return json.dumps({name: message[name] for name in _SIGNED if message.get(name)}, sort_keys=True).encode() + b"\n"


class SignReasoning(Middleware):
    """Signs the reasoning of chats. Without this middleware, signatures are empty."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer

    def before_request(self, attempt: AttemptContext, line: str, job: GenerateJob | ChatJob | PrefillJob) -> None:
        if isinstance(job, ChatJob):
            messages, options = conversation_of(job)
            attempt.sign[line] = self._signer.after(options.all_of(messages), job.parent_key).sign


def conversation_of(job: ChatJob | TemplateJob | PrefillJob) -> tuple[list[Message], ChatOptions]:
    """Return the messages and options that the model's chat template receives for a job."""
    messages: list[Message] = [message.model_dump(exclude_none=True) for message in job.messages]
    tools = [tool.model_dump(exclude_none=True) for tool in job.tools]
    options = ChatOptions(
        tools,
        tool_choice=job.tool_choice,
        enable_thinking=job.enable_thinking,
        template_args=job.template_args,
        system=job.system,
        chat_template=job.chat_template,
    )
    if isinstance(job, RepliedJob):
        options = replace(
            options,
            add_generation_prompt=job.add_generation_prompt,
            continue_final_message=job.continue_final_message,
        )
    if not isinstance(job, ChatJob):
        return messages, options
    return messages, replace(
        options,
        thinking_budget=job.thinking_budget,
        parallel_tool_calls=job.parallel_tool_calls,
        allowed_tools=job.allowed_tools,
    )
