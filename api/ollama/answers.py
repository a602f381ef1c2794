"""Convert job results and events into Ollama answers, and models into Ollama model lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cellama.api.anthropic.answers import input_of
from cellama.api.openai.answers import chat_logprobs, warnings_of
from cellama.tasks.contract.shapes.workers import ModelView

from .parameters import CHAT

VERSION = "0.32.15"  # of Ollama, whose API these answers follow; some clients check whether it is recent enough
LATEST = ":latest"
NEVER = "2262-01-01T00:00:00Z"  # models don't expire; a later time would not fit into 64 bits of nanoseconds
NS_PER_MS = 1_000_000
_CAPABILITIES = {"generate": "completion", "chat": "completion", "embed": "embedding"}
_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Builds an endpoint's answers for a model, using the model name that the caller sent."""

    url: str
    model: str

    def part(
        self, text: str = "", thinking: str = "", calls: Sequence[Any] = (), logprobs: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """Return one part of a streamed answer. The part may be empty."""
        said: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if self.url == CHAT:
            message = {"role": "assistant", "content": text, **said}
            said = {"message": {**message, "tool_calls": calls_of(calls)} if calls else message}
        else:
            said = {"response": text, **said}
        reported = {} if logprobs is None else {"logprobs": chat_logprobs(logprobs)["content"]}
        return {"model": self.model, "created_at": now(), **said, "done": False, **reported}

    def whole(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole answer for a job's result."""
        message = result.get("message", {"content": result.get("text", "")})
        calls = message.get("tool_calls") or ()
        part = self.part(message["content"], message.get("reasoning") or "", calls, result.get("logprobs"))
        return {**part, **end_of(result)}

    def parts(self, event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the stream parts for a job event."""
        kind = event["type"]
        if kind == "ping":
            yield self.part()  # clients expect an object in each line, so an empty part keeps the connection open
        elif kind == "done":
            if event.get("tool_calls"):
                yield self.part(calls=event["tool_calls"])
            yield {**self.part(), **end_of(event)}
        elif kind in ("token", "reasoning") and (event["text"] or event.get("logprobs")):
            text, thinking = (event["text"], "") if kind == "token" else ("", event["text"])
            yield self.part(text, thinking, logprobs=event.get("logprobs"))

    def loaded(self) -> dict[str, Any]:
        """Return the answer to a request without a prompt, which checks whether the model is loaded."""
        return {**self.part(), "done": True, "done_reason": "load"}

    def unloaded(self) -> dict[str, Any]:
        """Return the answer to a request that unloads the model."""
        return {**self.part(), "done": True, "done_reason": "unload"}


def end_of(end: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer's final members: the reason why the answer ended, and the counts and durations in nanoseconds.

    The time in the queue is reported as the load duration. A timed-out job has the reason `length`, like a truncated
    answer.
    """
    timings, usage = end.get("timings", {}), end["usage"]
    total, queued = timings.get("duration_ms") or 0.0, timings.get("queue_ms") or 0.0
    first = timings.get("ttft_ms")
    prefilled = total if first is None else first
    return {
        "done": True,
        "done_reason": "stop" if end["finish_reason"] == "stop" else "length",
        "total_duration": _ns(total),
        "load_duration": _ns(queued),
        "prompt_eval_count": usage["prompt_tokens"],
        "prompt_eval_duration": _ns(prefilled - queued),
        "eval_count": usage["completion_tokens"],
        "eval_duration": _ns(total - prefilled),
        **warnings_of([end]),
    }


def _ns(ms: float) -> int:
    return max(0, round(ms * NS_PER_MS))


def calls_of(calls: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tool calls in Ollama's format, with arguments as objects."""
    return [
        {
            "id": call["id"],
            "function": {
                "index": index,
                "name": call["function"]["name"],
                "arguments": input_of(call["function"]["arguments"], is_partial=bool(call.get("partial"))),
            },
        }
        for index, call in enumerate(calls)
    ]


# Models


def name_of(view: ModelView) -> str:
    """Return a model's name with a tag, because clients add `:latest` to names without a tag."""
    return view["id"] if ":" in view["id"] else view["id"] + LATEST


def listed(view: ModelView) -> dict[str, Any]:
    """Return a model's entry in the model list."""
    return {
        "name": name_of(view),
        "model": name_of(view),
        "modified_at": _time(view.get("ready_at") or 0.0),
        "size": view.get("size_bytes") or 0,
        "digest": view.get("fingerprint") or "",
        "details": details_of(view),
        "capabilities": capabilities_of(view),
    }


def running(view: ModelView) -> dict[str, Any]:
    """Return a model's entry in the list of loaded models."""
    memory = view.get("memory") or {}
    on_gpus = sum(
        use["weights_bytes"] + use["kv_bytes"] + use["compute_bytes"]
        for device, use in memory.items()
        if device != "CPU"
    )
    return {
        "name": name_of(view),
        "model": name_of(view),
        "size": view.get("memory_bytes") or 0,
        "digest": view.get("fingerprint") or "",
        "details": details_of(view),
        "expires_at": NEVER,
        "size_vram": on_gpus,
        "context_length": view.get("ctx_per_slot") or 0,
    }


def shown(view: ModelView) -> dict[str, Any]:
    """Return a model's description. The context length shown is the slot's context length, which limits requests."""
    architecture, context = view.get("architecture") or "", view.get("ctx_per_slot") or 0
    parameters = {"num_ctx": context, **view.get("sampling", {})}
    return {
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters.items()),
        "template": "",
        "details": details_of(view),
        "model_info": {
            "general.architecture": architecture,
            "general.basename": view["id"],
            "general.parameter_count": view.get("n_params") or 0,
            f"{architecture}.context_length": context,
            f"{architecture}.embedding_length": view.get("n_embd") or 0,
            f"{architecture}.vocab_size": view.get("n_vocab") or 0,
        },
        "capabilities": capabilities_of(view),
        "modified_at": _time(view.get("ready_at") or 0.0),
    }


def details_of(view: ModelView) -> dict[str, Any]:
    """Return the details of a model file."""
    architecture = view.get("architecture") or ""
    return {
        "parent_model": "",
        "format": "gguf",
        "family": architecture,
        "families": [architecture],
        "parameter_size": size_text(view.get("n_params") or 0),
        "quantization_level": view.get("file_type") or "",
    }


def capabilities_of(view: ModelView) -> list[str]:
    """Return Ollama's names for the features that a model and its chat template support."""
    names = [_CAPABILITIES[name] for name in view["capabilities"] if name in _CAPABILITIES]
    return list(dict.fromkeys([*names, *view.get("chat_features", ())]))


def size_text(num_params: int) -> str:
    """Return a parameter count as text, such as 7.2B."""
    for size, unit in _UNITS:
        if num_params >= size:
            return f"{num_params / size:.1f}{unit}"
    return str(num_params)


def now() -> str:
    """Return the current time."""
    return _time(datetime.now(UTC).timestamp())


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
