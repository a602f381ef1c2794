"""Render the Helm chart, check its objects, and run its containers' commands and probes: `make charts` runs all tests.

The tests that need Helm are skipped until `make charts` has installed it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cellama.api.cli.services import GATEWAY_PORT, METRICS_PORT
from cellama.api.machine.redis_server import die_with, find_redis_binary, free_port
from cellama.config import Settings
from cellama.tasks.metrics.table import TABLE

from ..acceptance.test_compose import ENTRYPOINT
from ..conftest import PATIENCE_S, clean_environment, wait_until
from ..prometheus import Prometheus
from .environment import HELM, PYTHON, VALIDATE, is_installed

CHART = Path(__file__).parents[2] / "config" / "helm" / "cellama"
VALUES, SCHEMA = (
    yaml.safe_load((CHART / "values.yaml").read_text()),
    json.loads((CHART / "values.schema.json").read_text()),
)
needs_helm = pytest.mark.skipif(not is_installed(), reason="Helm is not installed; run `make charts`")
OLDEST, NEWEST = "1.27", "1.37"  # the oldest version in Chart.yaml, and the newest version with a schema
IMAGE = {"image": {"repository": "example.org/cellama", "tag": "1"}}
OWN_REDIS: dict[str, Any] = {**IMAGE, "redis": {"passwordSecret": {"name": "redis"}}}
FULL: dict[str, Any] = {
    **IMAGE,
    "redis": {"urlSecret": {"name": "redis"}},
    "pool": "gpu",
    "worker": {
        "nodeSelector": {"cloud.google.com/gke-accelerator": "nvidia-l4"},
        "modelsClaim": "models",
        "cacheClaim": "cache",
        "hfTokenSecret": {"name": "hub"},
        "podAnnotations": {"a": "b"},
        "affinity": {"podAntiAffinity": {}},
    },
    "gateway": {"enabled": True, "dataClaim": "data", "service": {"annotations": {"a": "b"}}},
    "autoscaling": {"enabled": True, "prometheus": {"selector": 'namespace="x"', "triggerAuthentication": "auth"}},
}
CASES = {
    "least": OWN_REDIS,
    "full": FULL,
    "workers only": {**FULL, "gateway": {"enabled": False}, "metrics": {"enabled": False}},
}


def helm(*argv: str, values: Mapping[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "values.yaml").write_text(json.dumps(values))
    command = [str(HELM), *argv, str(CHART), "--values", str(folder / "values.yaml")]
    home = {"HELM_CONFIG_HOME": str(folder), "HELM_CACHE_HOME": str(folder), "HELM_DATA_HOME": str(folder)}
    return subprocess.run(command, env={**os.environ, **home}, capture_output=True, text=True, timeout=60)


def render(values: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    done = helm("template", "demo", "--namespace", "llm", values=values, folder=folder)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def kind_of(objects: list[dict[str, Any]], kind: str, component: str = "worker") -> dict[str, Any]:
    label = "app.kubernetes.io/component"
    [found] = [one for one in objects if one["kind"] == kind and one["metadata"]["labels"][label] == component]
    return found


def pods(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from (one["spec"]["template"]["spec"] for one in objects if one["kind"] in ("Deployment", "StatefulSet"))


# The values


def test_default_values_match_the_schema() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.Draft7Validator(SCHEMA).validate(VALUES)


def test_schema_describes_exactly_the_values() -> None:
    def names(schema: dict[str, Any], values: dict[str, Any], path: str = "") -> Iterator[str]:
        if schema.get("additionalProperties") is not False or "$ref" in schema:
            return
        for name in schema["properties"].keys() ^ values.keys():
            yield f"{path}{name}"
        for name in schema["properties"].keys() & values.keys():
            if isinstance(values[name], dict):
                yield from names(schema["properties"][name], values[name], f"{path}{name}.")

    assert list(names(SCHEMA, VALUES)) == ["global"]  # Helm adds it


# The rendered objects


@needs_helm
@pytest.mark.parametrize("name", CASES)
def test_chart_passes_lint_and_the_schemas_of_kubernetes(name: str, tmp_path: Path) -> None:
    done = helm("lint", "--strict", values=CASES[name], folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    objects = [one for one in render(CASES[name], tmp_path) if one["kind"] != "ScaledObject"]
    assert len(objects) >= 3
    (tmp_path / "objects.yaml").write_text(yaml.safe_dump_all(objects))
    for version in (OLDEST, NEWEST):
        argv = [str(VALIDATE), "--strict", "--kubernetes-version", version, str(tmp_path / "objects.yaml")]
        found = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        output = found.stdout + found.stderr
        assert found.returncode == 0, output
        assert output.count(" passed for resource ") == len(objects), output


def strict(schema: Any) -> Any:
    """Return a schema that also rejects unknown fields, as the Kubernetes API does for the fields of a CRD."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {} if "properties" not in schema else {"additionalProperties": False}
    return {name: strict(each) for name, each in schema.items()} | closed


@needs_helm
def test_scaled_object_matches_the_schema_of_keda(tmp_path: Path) -> None:
    code = "import json; from cloudcoil.models.keda.v1alpha1 import ScaledObject as S; "
    code += "print(json.dumps(S.model_json_schema()))"
    printed = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    schema = strict(json.loads(printed))
    found = kind_of(render(FULL, tmp_path), "ScaledObject")
    jsonschema.validate(found, schema)
    for wrong in ({"minReplicas": 0}, {"triggers": [{"type": "prometheus", "metadata": {"threshold": 1}}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**found, "spec": {**found["spec"], **wrong}}, schema)
    [trigger] = found["spec"]["triggers"]
    assert trigger["metadata"]["query"] == 'max(cellama_wanted_workers{pool="gpu",namespace="x"})'
    assert "cellama_wanted_workers" in TABLE
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    assert found["spec"]["scaleTargetRef"]["name"] == kind_of(render(FULL, tmp_path), "Deployment")["metadata"]["name"]
    assert found["spec"]["minReplicaCount"] == 0


@needs_helm
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "image.repository: set the repository"),
        (IMAGE, "redis.passwordSecret.name: set it, or set redis.urlSecret.name"),
        ({**OWN_REDIS, "worker": {"gpus": 1}}, "additional properties 'gpus' not allowed"),
        ({**OWN_REDIS, "settings": 'redis_url = "redis://x"'}, "at '/settings'"),
    ],
)
def test_chart_rejects_wrong_values(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    done = helm("template", "demo", values=values, folder=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr


@needs_helm
def test_pods_run_without_privileges_and_read_secrets_by_reference(tmp_path: Path) -> None:
    objects = [*render(FULL, tmp_path), *render(OWN_REDIS, tmp_path)]
    assert not [one for one in objects if one["kind"] == "Secret"]
    for pod in pods(objects):
        assert pod["securityContext"]["runAsNonRoot"]
        assert (pod["enableServiceLinks"], pod["automountServiceAccountToken"]) == (False, False)
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            secret = [one["name"] for one in container["env"] if "valueFrom" in one]
            assert secret, "the URL or the password of Redis"


@needs_helm
def test_workers_have_time_to_drain_and_are_replaced_one_at_a_time(tmp_path: Path) -> None:
    objects = render(FULL, tmp_path)
    deployment = kind_of(objects, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert "replicas" not in deployment["spec"], "KEDA sets them"
    drain_s = int(environment_of(pod["containers"][0], {})["CELLAMA_DRAIN_S"])
    assert pod["terminationGracePeriodSeconds"] >= drain_s + 30
    assert kind_of(objects, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert pod["nodeSelector"] == FULL["worker"]["nodeSelector"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert kind_of(render(OWN_REDIS, tmp_path), "Deployment")["spec"]["replicas"] == 1


@needs_helm
def test_notes_name_objects_that_exist(tmp_path: Path) -> None:
    done = helm("install", "demo", "--dry-run=client", "--namespace", "llm", values=FULL, folder=tmp_path)
    if done.returncode:
        pytest.skip(f"this Helm renders notes only with a cluster: {done.stderr.strip()[:200]}")
    assert "deploy/demo-metrics" in done.stdout


# The containers as processes


def environment_of(container: Mapping[str, Any], secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a container, with `secrets` by name of the Secret."""
    found: dict[str, str] = {}
    for one in container["env"]:
        value = one.get("value")
        if value is None:
            value = secrets.get(one["valueFrom"]["secretKeyRef"]["name"], "")
        for name, known in found.items():
            value = value.replace(f"$({name})", known)
        assert not one["name"].startswith("CELLAMA_") or is_setting(one["name"])
        found[one["name"]] = value
    return found


def is_setting(variable: str) -> bool:
    return variable == "CELLAMA_CONFIG" or variable.removeprefix("CELLAMA_").lower() in Settings.model_fields


class Release:
    """Runs the containers of a rendered chart as processes of this machine, with other ports and directories."""

    def __init__(self, objects: list[dict[str, Any]], folder: Path) -> None:
        self.objects, self.folder = objects, folder
        self.ports = {name: free_port() for name in ("redis", "gateway", "metrics", "worker")}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        config = next(one for one in objects if one["kind"] == "ConfigMap")["data"]["cellama.toml"]
        (folder / "cellama.toml").write_text(config)

    def container(self, component: str) -> dict[str, Any]:
        kind = "StatefulSet" if component == "redis" else "Deployment"
        [container] = kind_of(self.objects, kind, component)["spec"]["template"]["spec"]["containers"]
        return dict(container)

    def environment(self, component: str) -> dict[str, str]:
        found = environment_of(self.container(component), {"redis": "secret"})
        found = {
            name: value.replace("demo-redis:6379", f"127.0.0.1:{self.ports['redis']}") for name, value in found.items()
        }
        found |= {"HOME": str(self.folder), "CELLAMA_CONFIG": str(self.folder / "cellama.toml")}
        if component == "worker":
            found["CELLAMA_METRICS_PORT"] = str(self.ports["worker"])
        if component == "gateway":
            found["CELLAMA_DATA_DIR"] = str(self.folder)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return clean_environment(**found, PATH=path)

    def start(self, component: str) -> None:
        container = self.container(component)
        argv = [*container.get("command", ENTRYPOINT), *container.get("args", [])]
        if component == "redis":
            argv = [str(find_redis_binary()), *argv[1:], "--port", str(self.ports["redis"])]
            argv = [part.replace("$(REDIS_PASSWORD)", "secret").replace("/data", str(self.folder)) for part in argv]
        elif component != "worker":
            argv += ["--port", str(self.ports[component])]
        with (self.folder / f"{component}.log").open("wb") as log:
            self.running[component] = subprocess.Popen(
                argv,
                cwd=self.folder,
                env=self.environment(component),
                stdout=log,
                stderr=log,
                preexec_fn=die_with(os.getpid()),
            )

    def is_ready(self, component: str) -> bool:
        """Run the readiness probe of a component."""
        assert self.running[component].poll() is None, self.log(component)
        container = self.container(component)
        probe = container["readinessProbe"]
        if "httpGet" in probe:
            [port] = [one["containerPort"] for one in container["ports"] if one["name"] == probe["httpGet"]["port"]]
            assert port == {"gateway": GATEWAY_PORT, "metrics": METRICS_PORT}[component]
            url = f"http://127.0.0.1:{self.ports[component]}{probe['httpGet']['path']}"
            argv = [sys.executable, "-c", f"import urllib.request as u; u.urlopen({url!r}, timeout=5)"]
        else:
            argv = probe["exec"]["command"]
        timeout_s = max(60, probe["timeoutSeconds"])
        done = subprocess.run(
            argv, cwd=self.folder, env=self.environment(component), capture_output=True, timeout=timeout_s
        )
        return done.returncode == 0

    def log(self, component: str) -> str:
        return (self.folder / f"{component}.log").read_text(errors="replace")

    def stop(self, component: str) -> int:
        process = self.running.pop(component)
        process.send_signal(signal.SIGTERM)
        return process.wait(PATIENCE_S)

    def close(self) -> None:
        for component in list(self.running)[::-1]:
            self.running[component].kill()
            self.running[component].wait()


@pytest.fixture
def release(tmp_path: Path) -> Iterator[Release]:
    """Start the Redis server of a release."""
    if not is_installed():
        pytest.skip("Helm is not installed; run `make charts`")
    values = {**OWN_REDIS, "gateway": {"enabled": True}, "autoscaling": {"enabled": True, "startupSeconds": 0}}
    release = Release(render(values, tmp_path), tmp_path)
    with contextlib.closing(release):
        release.start("redis")
        os_env = release.environment("metrics")
        argv = [*ENTRYPOINT, "status", "--json"]
        wait_until(lambda: subprocess.run(argv, env=os_env, cwd=tmp_path, capture_output=True).returncode == 0, "Redis")
        yield release


def test_containers_become_ready_and_exit_cleanly_on_sigterm(release: Release) -> None:
    environment = release.environment("metrics")
    key = [*ENTRYPOINT, "keys", "create", "acme"]
    subprocess.run(key, env=environment, cwd=release.folder, check=True, capture_output=True, timeout=PATIENCE_S)
    for component in ("metrics", "gateway", "worker"):
        release.start(component)
        assert component != "worker" or not release.is_ready(component)
        wait_until(lambda name=component: release.is_ready(name), component)  # type: ignore[misc]
    for component in ("worker", "gateway", "metrics"):
        assert release.stop(component) == 0, release.log(component)


def test_query_of_the_scaled_object_yields_the_number_of_workers(release: Release) -> None:
    release.start("metrics")
    prometheus = Prometheus(release.folder, {"metrics": [release.ports["metrics"]]}, 2)
    with contextlib.closing(prometheus):
        [trigger] = kind_of(release.objects, "ScaledObject")["spec"]["triggers"]
        query = trigger["metadata"]["query"]
        wait_until(lambda: prometheus.is_up(1), "the first scrape")
        wait_until(lambda: prometheus.value(query) == 0, "the number without jobs")
        argv = [*ENTRYPOINT, "generate", "tiny", "Once upon a time", "--wait"]
        sender = subprocess.Popen(
            argv, env=release.environment("metrics"), cwd=release.folder, stdout=subprocess.DEVNULL
        )
        try:
            wait_until(lambda: prometheus.value(query) == 1, "the number with a waiting job")
        finally:
            sender.kill()
            sender.wait()
