"""Check what `.ci/release.py` refuses, in scratch repositories."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from ..ci_scripts import ci_script

release = ci_script("release")
CHANGELOG = """# Changelog

## [1.2.0] - 2026-01-02

- A change.

## [1.1.0] - 2025-01-02

- An older change.
"""


def git(repository: Path, *arguments: str) -> str:
    argv = ["git", "-C", str(repository), "-c", "user.name=A", "-c", "user.email=a@example.org", *arguments]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose version 1.2.0 can be released."""
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "pyproject.toml").write_text('[project]\nname = "cellama"\nversion = "1.2.0"\n')
    (repository / "CHANGELOG.md").write_text(CHANGELOG)
    git(repository, "init", "--quiet", "--initial-branch", "main")
    commit(repository)
    return repository


def commit(repository: Path) -> None:
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "A commit")


def problems(repository: Path, at_tag: str | None = None) -> list[str]:
    return list(release.release_problems(repository, release.project_version(repository), at_tag))


def test_release_has_no_problems_when_the_repository_is_ready(repository: Path) -> None:
    assert problems(repository) == []


def test_release_is_refused_when_a_file_is_not_committed(repository: Path) -> None:
    (repository / "new.py").touch()
    assert problems(repository) == ["working tree: 1 files are not committed; commit or remove them"]


def test_release_is_refused_when_the_branch_is_not_main(repository: Path) -> None:
    git(repository, "switch", "--quiet", "--create", "feature")
    assert problems(repository) == ["branch: 'feature' is not main; run git switch main"]


def test_release_is_refused_when_main_differs_from_origin(repository: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", str(repository), "clone")
    assert problems(tmp_path / "clone") == []
    commit(tmp_path / "clone")
    assert problems(tmp_path / "clone") == ["branch: main differs from origin/main; pull or push first"]


@pytest.mark.parametrize(
    ("heading", "problem"),
    [
        ("## [1.3.0] - 2026-01-02", "it has no section for 1.2.0; add '## [1.2.0] - YYYY-MM-DD'"),
        ("## [1.2.0] - unreleased", "'## [1.2.0] - unreleased' has no date; write '## [1.2.0] - YYYY-MM-DD'"),
        ("## [1.2.0] - 2026-01-02\n## Other", "the section of 1.2.0 is empty; list what users notice"),
    ],
)
def test_release_is_refused_when_the_changelog_has_no_complete_section(
    repository: Path, heading: str, problem: str
) -> None:
    (repository / "CHANGELOG.md").write_text(CHANGELOG.replace("## [1.2.0] - 2026-01-02", heading))
    commit(repository)
    assert problems(repository) == [f"CHANGELOG.md: {problem}"]


def test_release_is_refused_when_the_version_has_a_tag(repository: Path) -> None:
    git(repository, "tag", "v1.2.0")
    assert problems(repository) == ["tag: v1.2.0 already exists; increase the version in pyproject.toml"]


def test_release_is_refused_when_the_version_is_not_a_release_version(repository: Path) -> None:
    assert next(release.release_problems(repository, "1.2.dev0")) == (
        "pyproject.toml: version '1.2.dev0' is not a release; use for example 1.2.0 or 1.2.0rc1"
    )


def test_release_of_a_tag_requires_the_version_tag_at_this_commit(repository: Path) -> None:
    [missing] = problems(repository, "v1.2.0")
    assert missing == "tag: 'v1.2.0' does not point to this commit; run git switch --detach v1.2.0"
    git(repository, "tag", "v1.2.0")
    git(repository, "switch", "--quiet", "--detach", "v1.2.0")
    assert problems(repository, "v1.2.0") == []
    [other] = problems(repository, "v1.1.0")
    assert other == "tag: 'v1.1.0' does not match version 1.2.0 in pyproject.toml; use v1.2.0"


def test_changelog_section_ends_at_the_next_version(repository: Path) -> None:
    assert release.changelog_section(repository, "1.2.0") == "- A change."
    assert release.changelog_section(repository, "1.1.0") == "- An older change."


def test_tag_is_refused_when_a_step_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        release.main(["--tag", "--skip-tests"])
    assert "--tag requires all steps; remove --check-only, --skip-tests and --skip-sbom" in capsys.readouterr().err


def test_output_directory_is_refused_when_it_contains_other_files(tmp_path: Path) -> None:
    for name in ("cellama-1.1.0.tar.gz", "thesis.txt"):
        (tmp_path / name).touch()
    with pytest.raises(SystemExit, match=r"contains thesis\.txt; choose an empty directory"):
        release.clear_output(tmp_path)
    (tmp_path / "thesis.txt").unlink()
    release.clear_output(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_sdist_contains_sorted_members_without_owner_and_with_the_same_timestamp(tmp_path: Path) -> None:
    sdists = []
    for name in ("first.tar.gz", "second.tar.gz"):
        sdists.append(tmp_path / name)
        (tmp_path / "b").write_text("content")
        (tmp_path / "a").touch()
        with tarfile.open(sdists[-1], "w:gz") as archive:
            for file in ("b", "a") if name.startswith("first") else ("a", "b"):
                archive.add(tmp_path / file, file)
        release.normalize_sdist(sdists[-1], epoch=1_000_000_000)
    assert sdists[0].read_bytes() == sdists[1].read_bytes()
    with tarfile.open(sdists[0]) as archive:
        assert [(member.name, member.mtime, member.uid, member.uname) for member in archive] == [
            ("a", 1_000_000_000, 0, ""),
            ("b", 1_000_000_000, 0, ""),
        ]
