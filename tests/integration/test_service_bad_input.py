"""Bad input ends its job with a clear error and affects no other job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cellama.api import Client
from cellama.tasks import app, chat, embed, generate
from cellama.tasks.contract.errors import InvalidJob, JobFailed, UnknownModel

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from .conftest import GREEDY

HELLO = [{"role": "user", "content": "Hi"}]


def strict_tool(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": "f", "strict": True, "parameters": {"type": "object", "properties": properties}},
    }


def tool(name: str = "f", **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


SURROGATE = '{"type": "object", "properties": {"\\ud800": {"type": "string"}}}'  # half of a pair
DOUBLING = 'root ::= "a" root "x" | "a" root "y" | "a"{30}'
BRANCHING = "\n".join([*(f'r{n} ::= r{n + 1} "x" | r{n + 1} "y"' for n in range(40)), 'r40 ::= "a"', "root ::= r0"])
LEFT = 'root ::= a* root | "x"\na ::= "b"?'
CALLED = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}],
}
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (generate, ("tiny", "Hi"), {"max_token": 3}, "unknown parameter 'max_token'; did you mean 'max_tokens'"),
    (generate, ("tiny", "Hi"), {"max_tokens": 0}, "max_tokens is 0: .*greater than or equal to 1"),
    (generate, ("tiny", "Hi"), {"max_tokens": "8"}, "max_tokens is '8': .*valid integer"),
    (generate, ("tiny", "Hi"), {"temperature": -0.5}, r"temperature is -0\.5: .*greater than or equal to 0"),
    (generate, ("tiny", ""), {}, "prompt is '': the text is empty"),
    (generate, ("tiny", "a\0b"), {}, "NUL character"),
    (generate, ("tiny", "a\udce9b"), {}, "not valid UTF-8 at character 1"),
    (generate, ("tiny", "Hi"), {"json_schema": {"properties": {"\ud800": {}}}}, "not valid UTF-8 at character 0"),
    (chat, ("tiny", [CALLED]), {}, "function.arguments is .* not valid UTF-8 at character 0"),
    (generate, ("tiny",), {}, "prompt is missing"),
    (generate, ("tiny", "Hi", 3), {}, "3 positional arguments, but at most 2"),
    (chat, ("tiny", [{"role": "robot", "content": "Hi"}]), {}, r"messages\.0\.role is 'robot'"),
    (chat, ("tiny", []), {}, "messages is"),
    (chat, ("tiny", [{"role": "user"}]), {}, "content is missing"),
    (chat, ("tiny", [{"role": "user", "content": "a", "reasoning": "b"}]), {}, "role 'user' does not allow tool_calls"),
    (chat, ("tiny", [{"role": "user", "content": [{"type": "image"}]}]), {}, "content parts must have type 'text'"),
    (chat, ("tiny", HELLO), {"tools": [{"type": "function"}]}, r"tools\.0\.function is missing"),
    (chat, ("tiny", HELLO), {"tools": [tool("get weather")]}, r"tools\.0\.function\.name is 'get weather'"),
    (chat, ("tiny", HELLO), {"tools": [tool(type="string")]}, 'use a JSON Schema of type "object"'),
    (chat, ("tiny", HELLO), {"tools": [tool(type="object", required=["x"])]}, "`required` is not valid"),
    (chat, ("tiny", HELLO), {"tools": [tool(), tool()]}, "f: this name is used twice"),
    (chat, ("tiny", HELLO), {"thinking_budget": -1}, "thinking_budget is -1"),
    (embed, ("tiny", []), {}, "texts is"),
    (embed, ("tiny", ["a", ""]), {}, r"texts\.1 is '': the text is empty"),
    (embed, ("tiny", [[1], []]), {}, r"texts\.1 is \[\]"),
    (embed, ("tiny", [[1, "a"]]), {}, r"texts\.0\.1 is 'a'"),
]


@pytest.mark.parametrize(("task", "args", "kwargs", "message"), CALLS)
def test_invalid_call_is_rejected_before_queueing(
    task: Any, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidJob, match=message):
        task.apply_async(args, kwargs)


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "code", "message"),
    [
        ("generate", ["tiny", "Hi"], {"max_token": 3}, "invalid_request", "did you mean 'max_tokens'"),
        (
            "generate",
            ["tiny", "Hi"],
            {"json_schema": SURROGATE},
            "invalid_request",
            "json_schema is .* not valid UTF-8",
        ),
        (
            "generate",
            ["tiny", "Hi"],
            {"stop": "\ud800"},
            "invalid_request",
            r"stop\.0 is .* not valid UTF-8",
        ),
        ("generate", ["tiny", "Hi"], {"adapters": {"\ud800": "x"}}, "invalid_request", "adapters"),
        ("generate", ["tiny", "Hi"], {"grammar": BRANCHING}, "grammar_failed", "the grammar is too ambiguous"),
        ("generate", ["tiny", "Hi"], {"grammar": LEFT}, "invalid_request", "starts with itself"),
        (
            "generate",
            ["tiny", "Hi"],
            {"json_schema": '{"minItems": 1000000000}'},
            "invalid_request",
            "at #/minItems: ",
        ),
        ("generate", ["tiny", "Hi"], {"mirostat": 1, "mirostat_tau": 600}, "invalid_request", "mirostat_tau is 600"),
        ("generate", ["tiny", "Hi"], {"repeat_last_n": 10**18}, "invalid_request", "less than or equal to 1048576"),
        ("generate", ["tiny", "Hi"], {"dry_penalty_last_n": 2**31 - 1}, "invalid_request", "dry_penalty_last_n is"),
        ("generate", ["tinny", "Hi"], {}, "unknown_model", "model 'tinny' is not .* did you mean 'tiny'"),
        ("generate", ["tiny", "word " * 3000], {}, "prompt_too_long", r"is too long: \d+ tokens > 2047 maximum"),
        ("generate", ["tiny", [5, 10**6]], {}, "invalid_request", "token ids outside the range 0 to 1023"),
        ("embed", ["tiny", ["word " * 3000]], {}, "prompt_too_long", "texts.0 has .* the model's limit is 2048"),
        ("chat", ["tiny", HELLO], {"tool_choice": "required"}, "invalid_request", "no tools are given"),
        ("chat", ["tiny", HELLO], {"tools": [tool()], "tool_choice": "g"}, "invalid_request", "is not a tool of"),
        (
            "chat",
            ["tiny", HELLO],
            {"tools": [strict_tool({"a": {"type": "string", "pattern": "(?=a)"}})]},
            "invalid_request",
            r"tools\.0\.function\.parameters at #/properties/a/pattern: 'pattern' can't be enforced",
        ),
        (
            "chat",
            ["tiny", HELLO],
            {"tools": [tool()], "tool_choice": "f", "json_schema": "{}"},
            "invalid_request",
            "be combined with json_schema",
        ),
        (
            "chat",
            ["tiny", [{"role": "assistant", "content": "a", "reasoning": "b", "signature": "forged"}]],
            {},
            "invalid_request",
            r"messages\.0: the signature does not match the reasoning",
        ),
    ],
)
def test_invalid_job_fails_with_code_and_message_without_affecting_other_jobs(
    worker: WorkerProcess,
    events_of: Callable[..., list[dict[str, Any]]],
    name: str,
    args: list[Any],
    kwargs: dict[str, Any],
    code: str,
    message: str,
) -> None:
    told_before = len(worker.log())
    good = generate.delay("tiny", "Once upon a time", max_tokens=8, **GREEDY)
    bad = app.send_task(f"cellama.{name}", args, kwargs, queue="cellama:queue:tiny")
    with pytest.raises(JobFailed, match=message) as caught:
        bad.get(timeout=PATIENCE_S)
    assert (caught.value.code, caught.value.retryable) == (code, False)
    assert events_of(bad.id) == [
        {"seq": 0, "type": "error", "code": code, "message": str(caught.value), "retryable": False}
    ]
    assert good.get(timeout=PATIENCE_S)["finish_reason"] == "length"
    assert "Traceback" not in worker.log()[told_before:]


def test_exponential_grammar_fails_only_its_own_job(
    worker: WorkerProcess, events_of: Callable[..., list[dict[str, Any]]]
) -> None:
    good = generate.delay("tiny", "Once upon a time", max_tokens=60, **GREEDY)
    bad = generate.delay("tiny", "Hi", grammar=DOUBLING)
    with pytest.raises(JobFailed, match="the grammar is too ambiguous: more than") as caught:
        bad.get(timeout=PATIENCE_S)
    assert caught.value.code == "grammar_failed"
    told = events_of(bad.id)
    assert (told[0]["type"], told[-1]["type"]) == ("started", "error")
    assert good.get(timeout=PATIENCE_S)["text"]


def test_client_raises_unknown_model_immediately(client: Client) -> None:
    with pytest.raises(UnknownModel, match="no running worker serves the model 'tinny'; did you mean 'tiny'"):
        client.generate("tinny", "Hi")
    waiting = client.generate("tinny", "Hi", wait=True)
    waiting.cancel()
    assert client.stats()["queues"]["tiny"] == 0
    # Workers that other tests have killed stay in the registry for a while.
    wait_until(lambda: [model["id"] for model in client.models()] == ["tiny"], "the models that are served")
