"""docker-compose.yml is what the Compose Specification allows, and names what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml

from cellama.api.cli import app
from cellama.api.cli.services import GATEWAY_PORT, METRICS_PORT
from cellama.config import Settings

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILE = (ROOT / "Dockerfile").read_text()

TEXT, TEXTS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
DURATION = {"type": "string", "pattern": r"^(\d+(us|ms|s|m|h))+$"}


def object_of(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def map_of(values: Any) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {r"^[a-zA-Z0-9._-]+$": values}, "additionalProperties": False}


GPU = object_of(
    ("capabilities",), driver=TEXT, count={"type": ["integer", "string"]}, capabilities={**TEXTS, "minItems": 1}
)
SERVICE = object_of(
    image=TEXT,
    build={"oneOf": [TEXT, object_of(context=TEXT, args=map_of(TEXT))]},
    entrypoint=TEXTS,
    command=TEXTS,
    environment=map_of({"type": ["string", "number", "null"]}),
    volumes={"type": "array", "items": {"type": "string", "pattern": r"^[^:]+:/[^:]*(:ro|:rw)?$"}},
    ports={"type": "array", "items": {"type": "string", "pattern": r"^([\d.]+:)?\d+:\d+$"}},
    depends_on=map_of(
        object_of(
            ("condition",),
            condition={"enum": ["service_started", "service_healthy", "service_completed_successfully"]},
        )
    ),
    healthcheck=object_of(
        ("test",),
        test={**TEXTS, "minItems": 2, "prefixItems": [{"enum": ["CMD", "CMD-SHELL"]}]},
        **dict.fromkeys(("interval", "timeout", "start_period"), DURATION),
        retries={"type": "integer", "minimum": 1},
    ),
    restart={"type": "string", "pattern": r"^(no|always|unless-stopped|on-failure(:\d+)?)$"},
    stop_grace_period=DURATION,
    profiles=TEXTS,
    deploy=object_of(resources=object_of(reservations=object_of(devices={"type": "array", "items": GPU}))),
)
# The part of https://github.com/compose-spec/compose-spec that the file uses. Any other key is rejected.
SCHEMA = {
    **object_of(("services",), services=map_of(SERVICE), volumes=map_of({"type": "null"})),
    "patternProperties": {"^x-": {}},
}


@pytest.fixture
def compose() -> Any:
    return yaml.safe_load(COMPOSE.read_text())


def test_compose_file_follows_the_specification(compose: Any) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(compose)
    for service in compose["services"].values():
        assert ("image" in service) != ("build" in service)
        assert "$" not in json.dumps(service).replace("$$", "")  # else Compose would put a variable of its own there


@pytest.mark.parametrize(
    ("service", "change"),
    [
        ("worker", {"stop_grace_period": "2 minutes"}),
        ("worker", {"restart": "sometimes"}),
        ("worker", {"comand": ["worker"]}),
        ("redis", {"healthcheck": {"test": ["ping"]}}),
        ("redis", {"ports": ["localhost:6379"]}),
        ("flower", {"depends_on": {"redis": {"condition": "healthy"}}}),
    ],
)
def test_compose_check_detects_a_mistake(compose: Any, service: str, change: Any) -> None:
    compose["services"][service] |= change
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(compose)


def test_compose_file_refers_only_to_existing_settings_commands_and_files(compose: Any) -> None:
    services = compose["services"]
    assert services["worker-gpu"]["profiles"] == ["gpu"]
    monitoring = {name for name, service in services.items() if service.get("profiles") == ["monitoring"]}
    assert monitoring == {"metrics", "prometheus", "grafana"}
    assert services["gateway"]["profiles"] == ["gateway"]
    assert {"redis", "worker", "worker-gpu", "flower", "gateway"} == set(services) - monitoring
    assert "--appendonly" in services["redis"]["command"]
    known = {f"CELLAMA_{name.upper()}" for name in Settings.model_fields}
    for service in services.values():
        assert set(service.get("environment", {})) <= known | {"FLOWER_BASIC_AUTH", "HF_TOKEN", "CELLAMA_CONFIG"}
        assert set(service.get("depends_on", {})) <= set(services)
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert {services[name]["command"][0] for name in ("worker", "metrics", "gateway")} <= commands
    assert ":?" not in COMPOSE.read_text()  # `down` and `logs` ask for nothing
    named = {volume.partition(":")[0] for service in services.values() for volume in service.get("volumes", [])}
    assert {name for name in named if not name.startswith(".")} == set(compose["volumes"])
    assert all((ROOT / name).exists() for name in named if name.startswith("./docs"))


def test_compose_prometheus_scrapes_the_ports_of_its_services(compose: Any) -> None:
    told = yaml.safe_load((ROOT / "docs" / "dashboards" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in told["scrape_configs"]}
    (workers,) = jobs["cellama-workers"]["dns_sd_configs"]
    environment = compose["services"]["worker"]["environment"]
    assert environment["CELLAMA_METRICS_PORT"] == str(workers["port"])
    assert set(workers["names"]) <= set(compose["services"])
    assert jobs["cellama-queues"]["static_configs"] == [{"targets": [f"metrics:{METRICS_PORT}"]}]


def test_image_installs_the_packages_that_its_services_need(compose: Any) -> None:
    [extras] = re.findall(r"'\.\[([a-z,]+)\]'", DOCKERFILE)
    assert {"worker", "flower", "http", "metrics"} <= set(extras.split(","))
    assert f"127.0.0.1:{GATEWAY_PORT}:{GATEWAY_PORT}" in compose["services"]["gateway"]["ports"]
    for service in compose["services"].values():  # a new volume is the user's where the image has the folder
        own = [volume for volume in service.get("volumes", []) if "build" in service and not volume.startswith(".")]
        assert all(volume.endswith(":/home/cellama/.cache") for volume in own)


def test_image_contains_only_bundled_models_and_uses_the_base_images_of_compose(compose: Any) -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {"models", "build", ".venv", "!engine/bundled/*.gguf"} <= set(ignored)
    arguments = {line.split()[1].partition("=")[0] for line in DOCKERFILE.splitlines() if line.startswith("ARG ")}
    assert set(compose["services"]["worker-gpu"]["build"]["args"]) == arguments
    assert "devel" not in compose["services"]["worker-gpu"]["build"]["args"]["BASE"]
