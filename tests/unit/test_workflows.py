"""Check the workflow files of the forges, which can't run here: what they call, and what they may write."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github" / "workflows"
FILES = [GITHUB / "ci.yml", GITHUB / "release.yml", ROOT / ".gitlab-ci.yml"]
GITLAB_KEYWORDS = {"stages", "workflow"}


def jobs(file: Path) -> dict[str, Any]:
    content = yaml.safe_load(file.read_text())
    if file.parent == GITHUB:
        return dict(content["jobs"])
    return {name: job for name, job in content.items() if name not in GITLAB_KEYWORDS}


def commands(job: dict[str, Any]) -> list[str]:
    """Return the shell commands of a job of either forge."""
    return [*job.get("script", []), *(step["run"] for step in job.get("steps", []) if "run" in step)]


def actions(job: dict[str, Any]) -> list[str]:
    return [step["uses"] for step in job.get("steps", []) if "uses" in step]


def may_write(job: dict[str, Any]) -> bool:
    return "id_tokens" in job or "write" in job.get("permissions", {}).values()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_workflows_call_executable_files_of_the_repository(file: Path) -> None:
    called = [
        name for job in jobs(file).values() for line in commands(job) for name in re.findall(r"\.ci/[\w.-]+", line)
    ]
    assert called
    assert [name for name in called if not os.access(ROOT / name, os.X_OK)] == []


@pytest.mark.parametrize("files", [FILES[:2], FILES[2:]], ids=["github", "gitlab"])
def test_workflows_run_the_tests_build_the_image_and_build_the_release_of_a_tag(files: list[Path]) -> None:
    lines = [line for file in files for job in jobs(file).values() for line in commands(job)]
    assert ".ci/run" in lines
    assert ".ci/image" in lines
    assert any(re.fullmatch(r'\.ci/release\.py --at-tag "\$\w+"', line) for line in lines)


@pytest.mark.parametrize("file", FILES[1:], ids=lambda file: file.name)
def test_releases_are_published_with_attestations_and_without_a_stored_password(file: Path) -> None:
    publish = jobs(file)["publish"]
    if file.parent == GITHUB:
        assert publish["permissions"] == {"id-token": "write", "attestations": "write"}
        [step] = [step for step in publish["steps"] if "pypi-publish" in step.get("uses", "")]
        assert step["with"] == {"packages-dir": "packages", "attestations": True}
    else:
        assert {token["aud"] for token in publish["id_tokens"].values()} == {"pypi", "sigstore"}
        assert "python -m twine upload --attestations dist/cellama-*" in publish["script"]
    assert not re.search(r"secrets\.|password:|TWINE_", file.read_text())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_jobs_with_write_permission_run_no_repository_code(file: Path) -> None:
    for name, job in jobs(file).items():
        if may_write(job):
            assert not any(".ci/" in line for line in commands(job)), name
            assert not any(action.startswith("actions/checkout@") for action in actions(job)), name
            assert file.parent == GITHUB or job["variables"]["GIT_STRATEGY"] == "none", name


@pytest.mark.parametrize("file", FILES[:2], ids=lambda file: file.name)
def test_github_workflows_have_only_read_permissions_by_default(file: Path) -> None:
    assert yaml.safe_load(file.read_text())["permissions"] == {"contents": "read"}
    for action in [action for job in jobs(file).values() for action in actions(job)]:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[\w./-]+", action)


def test_image_does_not_run_as_root() -> None:
    last_stage = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    users = re.findall(r"^USER (\S+)$", last_stage, re.MULTILINE)
    assert users
    assert users[-1] not in {"root", "0"}
    assert f"useradd --create-home {users[-1]}" in last_stage
