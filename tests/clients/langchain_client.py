"""Use LangChain's models with tools, streams, structured output and agents through its OpenAI and Anthropic packages.

`python langchain_client.py URL` prints one line per check. Packages that are not installed are skipped.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any

import checks
from checks import MODEL, QUESTION, TIMEOUT_S
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field

URL = sys.argv[1]
ONCE: Any = {"model": MODEL, "max_retries": 0, "timeout": TIMEOUT_S, "max_tokens": 80, "temperature": 0}
weather = tool(checks.get_weather)


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)
    is_large: bool


def models() -> dict[str, Any]:
    """Return the installed models by name."""
    from langchain_openai import ChatOpenAI

    openai = functools.partial(ChatOpenAI, base_url=f"{URL}/v1", api_key="none", **ONCE)
    made = {"chat": openai(use_responses_api=False), "responses": openai(use_responses_api=True)}
    if importlib.util.find_spec("langchain_anthropic"):
        from langchain_anthropic import ChatAnthropic

        once = {name: value for name, value in ONCE.items() if name != "temperature"}
        made["anthropic"] = ChatAnthropic(base_url=URL, api_key="none", model_kwargs={}, **once)
    return made


def tools_in_two_steps(model: Any) -> None:
    bound = model.bind_tools([weather])
    turns: list[Any] = [HumanMessage(QUESTION)]
    called = bound.invoke(turns)
    assert called.tool_calls, called
    turns += [called, *(weather.invoke(call) for call in called.tool_calls)]
    answer = bound.invoke(turns)
    assert answer.text, answer
    assert bound.invoke([*turns, answer, HumanMessage("And in Rome?")]).usage_metadata["output_tokens"]


def streamed_tools_in_two_steps(model: Any) -> None:
    bound = model.bind_tools([weather])
    turns: list[Any] = [HumanMessage(QUESTION)]
    called = functools.reduce(lambda one, other: one + other, bound.stream(turns))
    assert called.tool_calls, called
    turns += [called, *(weather.invoke(call) for call in called.tool_calls)]
    answer = functools.reduce(lambda one, other: one + other, bound.stream(turns))
    assert answer.text, answer
    assert bound.invoke([*turns, answer, HumanMessage("And in Rome?")]).usage_metadata["output_tokens"]


def structured_output(model: Any) -> None:
    for method in ("function_calling", "json_schema"):
        answer = model.with_structured_output(City, method=method, include_raw=True).invoke(QUESTION)
        assert isinstance(answer["parsed"], City), (method, answer)
        calls = [{"type": "tool", "content": "ok", "tool_call_id": call["id"]} for call in answer["raw"].tool_calls]
        assert model.invoke([HumanMessage(QUESTION), answer["raw"], *calls, HumanMessage("And in Rome?")])


def agent(model: Any) -> None:
    from langchain.agents import create_agent

    made = create_agent(model, [weather])
    state = made.invoke({"messages": [HumanMessage(QUESTION)]})
    assert [message.type for message in state["messages"]] == ["human", "ai", "tool", "ai"], state
    state = made.invoke({"messages": [*state["messages"], HumanMessage(QUESTION)]})
    assert state["messages"][-1].type == "ai", state


def main() -> None:
    found = [tools_in_two_steps, streamed_tools_in_two_steps, structured_output]
    if importlib.util.find_spec("langchain"):
        found.append(agent)
    checks.run(
        [
            (f"{name}: {check.__name__.replace('_', ' ')}", functools.partial(check, model))
            for name, model in models().items()
            for check in found
        ]
    )


if __name__ == "__main__":
    main()
