"""Run agents of pydantic-ai with tools, streams and typed outputs, and continue their message histories.

`python pydantic_ai_client.py URL` prints one line per check.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import Any

import checks
from anthropic import AsyncAnthropic
from checks import MODEL, QUESTION, TIMEOUT_S
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL = sys.argv[1]
ONCE: Any = {"api_key": "none", "max_retries": 0, "timeout": TIMEOUT_S}


class City(BaseModel):
    name: str = Field(max_length=12)
    is_large: bool


def models() -> dict[str, Any]:
    """Return the models by name. Clients belong to an event loop, so each check makes its own."""
    openai = OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{URL}/v1", **ONCE))
    anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, **ONCE))
    return {
        "chat": OpenAIChatModel(MODEL, provider=openai),
        "responses": OpenAIResponsesModel(MODEL, provider=openai),
        "anthropic": AnthropicModel(MODEL, provider=anthropic),
    }


def agent(model: Any, **options: Any) -> Agent[None, Any]:
    return Agent(model, model_settings={"max_tokens": 80, "temperature": 0}, **options)


async def tools_and_history(model: Any) -> None:
    made = agent(model, tools=[checks.get_weather])
    first = await made.run(QUESTION)
    assert first.output, first
    assert any(part.part_kind == "tool-return" for message in first.all_messages() for part in message.parts)
    again = await made.run(QUESTION, message_history=first.all_messages())
    assert len(again.all_messages()) > len(first.all_messages())


async def streamed_tools_and_history(model: Any) -> None:
    made = agent(model, tools=[checks.get_weather])
    async with made.run_stream(QUESTION) as result:
        texts = [text async for text in result.stream_text()]
        history = result.all_messages()
    assert texts, history
    async with made.run_stream(QUESTION, message_history=history) as result:
        assert await result.get_output()


async def output_by_tool(model: Any) -> None:
    first = await agent(model, output_type=ToolOutput(City)).run(QUESTION)
    assert isinstance(first.output, City), first
    assert (await agent(model).run("And in Rome?", message_history=first.all_messages())).output


async def native_output(model: Any) -> None:
    first = await agent(model, output_type=NativeOutput(City)).run(QUESTION)
    assert isinstance(first.output, City), first
    assert (await agent(model).run("And in Rome?", message_history=first.all_messages())).output


def main() -> None:
    found = [
        (name, check)
        for name in ("chat", "responses", "anthropic")
        for check in (tools_and_history, streamed_tools_and_history, output_by_tool, native_output)
        # pydantic-ai rejects this itself, because it has no profile for a model of this name
        if (name, check) != ("anthropic", native_output)
    ]

    def run(name: str, check: Any) -> None:
        async def one() -> None:
            await check(models()[name])

        asyncio.run(one())

    checks.run(
        [(f"{name}: {check.__name__.replace('_', ' ')}", functools.partial(run, name, check)) for name, check in found]
    )


if __name__ == "__main__":
    main()
