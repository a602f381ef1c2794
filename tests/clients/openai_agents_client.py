"""Run agents of openai-agents with tools, handoffs, streams, sessions and typed outputs over both of its APIs.

`python openai_agents_client.py URL` prints one line per check.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import Any

import checks
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from checks import MODEL, QUESTION, TIMEOUT_S
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

URL = sys.argv[1]
weather = function_tool(checks.get_weather)


class City(BaseModel):
    name: str = Field(max_length=12)
    is_large: bool


def agent(kind: Any, **options: Any) -> Agent[Any]:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)
    settings = ModelSettings(temperature=0, max_tokens=80, tool_choice=options.pop("tool_choice", None))
    return Agent(name="assistant", model=kind(MODEL, client), model_settings=settings, **options)


async def tools_and_history(kind: Any) -> None:
    made = agent(kind, tools=[weather])
    first = await Runner.run(made, QUESTION)
    assert first.final_output, first
    assert [item.type for item in first.new_items][:2] == ["tool_call_item", "tool_call_output_item"], first
    again = await Runner.run(made, [*first.to_input_list(), {"role": "user", "content": QUESTION}])
    assert again.final_output, again


async def streamed_tools_and_history(kind: Any) -> None:
    made = agent(kind, tools=[weather])
    first = Runner.run_streamed(made, QUESTION)
    kinds = [event.type async for event in first.stream_events()]
    assert "raw_response_event" in kinds, kinds
    again = Runner.run_streamed(made, [*first.to_input_list(), {"role": "user", "content": QUESTION}])
    async for _ in again.stream_events():
        pass
    assert again.final_output, again


async def session(kind: Any) -> None:
    made, kept = agent(kind, tools=[weather]), SQLiteSession("one")
    for _ in range(2):
        assert (await Runner.run(made, QUESTION, session=kept)).final_output


async def output_type(kind: Any) -> None:
    first = await Runner.run(agent(kind, output_type=City), QUESTION)
    assert isinstance(first.final_output, City), first
    turns = [*first.to_input_list(), {"role": "user", "content": "And in Rome?"}]
    assert (await Runner.run(agent(kind), turns)).final_output


async def handoff(kind: Any) -> None:
    other = agent(kind, handoff_description="Knows the weather")
    first = await Runner.run(agent(kind, handoffs=[other], tool_choice="required"), QUESTION)
    assert any(item.type == "handoff_output_item" for item in first.new_items), first
    assert first.final_output, first


def main() -> None:
    set_tracing_disabled(True)

    def run(check: Any, kind: Any) -> None:
        asyncio.run(check(kind))

    checks.run(
        [
            (f"{name}: {check.__name__.replace('_', ' ')}", functools.partial(run, check, kind))
            for name, kind in (("chat", OpenAIChatCompletionsModel), ("responses", OpenAIResponsesModel))
            for check in (tools_and_history, streamed_tools_and_history, session, output_type, handoff)
        ]
    )


if __name__ == "__main__":
    main()
