"""The OpenAPI document against a real gateway: its examples work, and schemathesis finds no undocumented answer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import schemathesis

from cellama.api.http.app import API_ROUTES
from cellama.api.http.openapi import gateway_document

from ...conftest import EXAMPLES, clean_environment, wait_until
from ...gateways import COMMAND, GatewayProcess
from ..test_gateway_tenants import Keyed
from . import openapi_hooks
from .openapi_hooks import close_answers

DOCUMENT = gateway_document(API_ROUTES)
UNABLE = {"/v1/rerank", "/infill", "/v1/batches"}  # the model can't do the first two, and a batch needs a file
WITH_EXAMPLES = [
    (path, name)
    for path, methods in DOCUMENT["paths"].items()
    for media_type in methods.get("post", {}).get("requestBody", {}).get("content", {}).values()
    for name in media_type.get("examples", {})
    if path not in UNABLE and "rerank" not in path
]
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,use_after_free,ensure_resource_availability"
)
PHASES = "examples,fuzzing,stateful"
COVERAGE = ",coverage"  # some thousand requests with each value at its bounds, which take some minutes
MAX_EXAMPLES = 6  # per operation: the run takes about 20 s


def test_openapi_document_is_served_without_a_key(keyed: Keyed) -> None:
    assert keyed.process.get("/v1/models").status_code == 401
    served = [keyed.process.get(path) for path in ("/openapi.json", "/v1/openapi.json")]
    assert [one.status_code for one in served] == [200, 200]
    assert served[0].json() == served[1].json() == json.loads(json.dumps(DOCUMENT))


def test_command_prints_the_openapi_document() -> None:
    printed = subprocess.run([*COMMAND, "--openapi"], capture_output=True, check=True, env=clean_environment())
    assert json.loads(printed.stdout) == json.loads(json.dumps(DOCUMENT))


@pytest.mark.parametrize(("path", "name"), WITH_EXAMPLES)
def test_example_request_gets_the_documented_answer(gateway: GatewayProcess, path: str, name: str) -> None:
    document = json.loads(json.dumps(DOCUMENT))
    close_answers(document)
    operation = document["paths"][path]["post"]
    body = operation["requestBody"]["content"]["application/json"]["examples"][name]["value"]
    answer = gateway.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert '"error":{' not in answer.text
    assert answer.headers["content-type"].startswith("text/event-stream") == (body.get("stream") is True)
    schemathesis.openapi.from_dict(document)[path]["POST"].validate_response(answer)


def test_gateway_returns_only_what_the_openapi_document_describes(
    gateway: GatewayProcess, jobs_of_test: Callable[[], list[str]], tmp_path: Path
) -> None:
    uploaded = gateway.post("/v1/files", files={"file": ("a.jsonl", b"{}")}, data={"purpose": "batch"})
    phases = PHASES if EXAMPLES == 1 else PHASES + COVERAGE
    argv = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{gateway.url}/openapi.json"]
    argv += ["--checks", CHECKS, "--phases", phases, "--max-examples", str(MAX_EXAMPLES * EXAMPLES), "--seed", "36"]
    # Two workers would parse Python at the same time, which sometimes raises SystemError in CPython 3.11.
    argv += ["--generation-database", "none", "--continue-on-failure", "--no-shrink", "--workers", "1", "--no-color"]
    argv += ["--suppress-health-check", "all"]  # they depend on the speed of the machine
    argv += ["--report", "json,har", "--report-json-path", "report.json", "--report-har-path", "requests.har"]
    hooks = {"SCHEMATHESIS_HOOKS": openapi_hooks.__file__, openapi_hooks.FILE_ID: uploaded.json()["id"]}
    run = subprocess.run(argv, cwd=tmp_path, env=clean_environment(**hooks), capture_output=True, text=True)
    report = json.loads((tmp_path / "report.json").read_text())
    print(run.stdout)  # pytest shortens long texts in assertions
    assert run.returncode == 0, report["errors"]
    assert report["operations"]["tested"] == sum(map(len, DOCUMENT["paths"].values())) - 1  # without its own URL
    assert report["test_cases"]["generated"] > 200
    assert report["test_cases"]["without_checks"] == report["test_cases"]["errored"] == 0
    wait_until(lambda: not jobs_of_test(), "the end of all jobs")
    entries = json.loads((tmp_path / "requests.har").read_text())["log"]["entries"]
    found = Counter(entry["response"]["status"] for entry in entries)
    print("schemathesis:", report["test_cases"]["generated"], "requests, by status:", dict(sorted(found.items())))
    assert found[200] > 60  # else only errors were checked
    assert max(found) < 500
