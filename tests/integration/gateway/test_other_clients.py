"""Test other unmodified clients for OpenAI's API, each in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ...conftest import PATIENCE_S, clean_environment
from ...gateways import GatewayProcess

LANGCHAIN = """
import sys
from langchain_core.exceptions import ContextOverflowError
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

class City(BaseModel):
    name: str = Field(max_length=12)

@tool
def get_weather(city: str) -> str:
    "The weather in a city"
    return "sunny"

url = sys.argv[1]
model = ChatOpenAI(model="tiny", base_url=url, api_key="none", temperature=0, max_tokens=40, max_retries=0)
answer = model.invoke("What is the capital of France?")
assert answer.content and answer.usage_metadata["output_tokens"] > 0
assert "".join(part.content for part in model.stream("What is the capital of France?")) == answer.content
assert isinstance(model.with_structured_output(City).invoke("Where are you?"), City)
called = model.bind_tools([get_weather], tool_choice="get_weather").invoke("The weather?")
assert called.tool_calls[0]["name"] == "get_weather", called
vectors = OpenAIEmbeddings(model="tiny", base_url=url, api_key="none", check_embedding_ctx_length=False)
assert len(vectors.embed_documents(["a", "b"])) == 2
try:
    model.invoke("word " * 3000)
except ContextOverflowError:
    pass
else:
    raise AssertionError("a prompt without room was answered")
"""
LITELLM = """
import asyncio, sys
import litellm

url = sys.argv[1]
asked = dict(model="openai/tiny", api_base=url, api_key="none", temperature=0, max_tokens=12, num_retries=0,
             messages=[{"role": "user", "content": "What is the capital of France?"}])
text = litellm.completion(**asked).choices[0].message.content
assert text
assert "".join(part.choices[0].delta.content or "" for part in litellm.completion(**asked, stream=True)) == text
assert asyncio.run(litellm.acompletion(**asked)).choices[0].message.content == text
assert litellm.embedding(model="openai/tiny", api_base=url, api_key="none", input=["a"]).data[0]["embedding"]
try:
    litellm.completion(**{**asked, "model": "openai/nope"})
except litellm.NotFoundError:
    pass
else:
    raise AssertionError("an unknown model was found")
try:
    litellm.completion(**{**asked, "messages": [{"role": "user", "content": "word " * 3000}]})
except litellm.ContextWindowExceededError:
    pass
else:
    raise AssertionError("a prompt without room was answered")
"""
INSTRUCTOR = """
import sys
import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

class City(BaseModel):
    name: str = Field(max_length=12)
    is_large: bool

for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0), mode=mode)
    city = client.chat.completions.create(
        model="tiny", response_model=City, max_retries=0, max_tokens=80, temperature=0,
        messages=[{"role": "user", "content": "Where are you?"}],
    )
    assert isinstance(city, City)
"""


@pytest.mark.parametrize("script", [LANGCHAIN, LITELLM, INSTRUCTOR], ids=["langchain", "litellm", "instructor"])
def test_client_library_works(gateway: GatewayProcess, script: str, tmp_path: Path) -> None:
    environment = clean_environment(LITELLM_LOCAL_MODEL_COST_MAP="True", LANGSMITH_TRACING="false")
    argv = [sys.executable, "-c", script, f"{gateway.url}/v1"]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert done.returncode == 0, done.stderr[-4000:]


def test_openai_command_line_client_works(gateway: GatewayProcess, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: mine\n  model_name: tiny\n  api_base: {gateway.url}/v1\n"
    )
    for more in ([], ["--no-stream"]):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "llm",
                "-m",
                "mine",
                "What is the capital of France?",
                "-o",
                "temperature",
                "0",
                *more,
            ],
            cwd=tmp_path,
            env=clean_environment(LLM_USER_PATH=str(tmp_path)),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
