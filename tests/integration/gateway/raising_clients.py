"""Send requests with several client libraries, and print the exceptions that they raise.

The input is a JSON list of requests, and the output is a JSON list that names the exception of each client per request.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import anthropic
import litellm
import openai
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

Failing = Mapping[str, Any]  # model, text, max_tokens, temperature, stream, url, key, timeout and headers
PARAMETERS = ("model", "max_tokens", "temperature")


def messages_of(failing: Failing) -> Any:
    return [{"role": "user", "content": failing["text"]}]


def parameters_of(failing: Failing) -> dict[str, Any]:
    return {name: failing[name] for name in PARAMETERS}


def read(answer: Any, failing: Failing) -> Any:
    """Return an answer after its stream has ended."""
    return list(answer) if failing["stream"] else answer


def call_openai(failing: Failing) -> Any:
    url = f"{failing['url']}/v1"
    request = {**parameters_of(failing), "messages": messages_of(failing), "stream": failing["stream"]}
    with openai.OpenAI(base_url=url, api_key=failing["key"], max_retries=0, timeout=failing["timeout"]) as client:
        return read(client.chat.completions.create(**request, extra_headers=failing["headers"]), failing)


def call_anthropic(failing: Failing) -> Any:
    options = {"base_url": failing["url"], "api_key": failing["key"], "timeout": failing["timeout"]}
    request = {name: failing[name] for name in ("model", "max_tokens")} | {"messages": messages_of(failing)}
    body = {"temperature": failing["temperature"]}  # the client's own parameter is deprecated
    request |= {"stream": failing["stream"], "extra_headers": failing["headers"], "extra_body": body}
    with anthropic.Anthropic(max_retries=0, **options) as client:
        return read(client.messages.create(**request), failing)


def call_litellm(failing: Failing, provider: str, url: str) -> Any:
    request = {**parameters_of(failing), "model": f"{provider}/{failing['model']}", "stream": failing["stream"]}
    answer = litellm.completion(
        **request,
        messages=messages_of(failing),
        api_base=url,
        api_key=failing["key"],
        timeout=failing["timeout"],
        extra_headers=failing["headers"],
        num_retries=0,
        max_retries=0,
    )
    return read(answer, failing)


def call_langchain_openai(failing: Failing) -> Any:
    options = {**parameters_of(failing), "timeout": failing["timeout"], "api_key": failing["key"]}
    url, headers = f"{failing['url']}/v1", failing["headers"]
    client = ChatOpenAI(base_url=url, max_retries=0, default_headers=headers, **options)
    return list(client.stream(failing["text"])) if failing["stream"] else client.invoke(failing["text"])


def call_langchain_anthropic(failing: Failing) -> Any:
    options = {**parameters_of(failing), "timeout": failing["timeout"], "api_key": failing["key"]}
    url, headers = failing["url"], failing["headers"]
    client = ChatAnthropic(base_url=url, max_retries=0, default_headers=headers, **options)
    return list(client.stream(failing["text"])) if failing["stream"] else client.invoke(failing["text"])


CLIENTS: Mapping[str, Callable[[Failing], Any]] = {
    "openai": call_openai,
    "anthropic": call_anthropic,
    "litellm openai": lambda failing: call_litellm(failing, "openai", f"{failing['url']}/v1"),
    "litellm anthropic": lambda failing: call_litellm(failing, "anthropic", failing["url"]),
    "langchain openai": call_langchain_openai,
    "langchain anthropic": call_langchain_anthropic,
}


def raised_by(call: Callable[[Failing], Any], failing: Failing) -> str:
    try:
        call(failing)
    except Exception as error:
        return type(error).__name__
    return "nothing"


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    named = [{name: raised_by(call, failing) for name, call in CLIENTS.items()} for failing in json.load(sys.stdin)]
    json.dump(named, sys.stdout)
