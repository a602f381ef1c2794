#!/usr/bin/env python3
"""Check and build a release of cellama, and create its tag if `--tag` is given.

Without an option, the script does a dry run: it performs every step except creating the tag. The steps are:

1. Check that everything is committed, and that the branch is main and matches origin. CHANGELOG.md must have a section
   with a date for the version in pyproject.toml. The tag must not exist yet.
2. Run `.ci/run`.
3. Build the sdist and the wheel from the commit. Two builds of the same commit are byte-for-byte identical.
4. Write a CycloneDX SBOM, release notes and SHA-256 checksums.
5. With `--tag`, create the annotated tag vVERSION.

Pushing the tag starts the forge's workflow, which builds again with `--at-tag` and publishes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD_TOOLS = ("build>=1.2,<2",)
SBOM_TOOLS = ("cyclonedx-bom>=7,<8",)
# The extras that run a complete installation. llama.cpp is built once; pip keeps its wheel.
SBOM_EXTRAS = "worker,http,files,flower,metrics,otel,embedded,parquet"
OTHER_FILES = ("NOTES.md", "SHA256SUMS", "sbom.cdx.json")  # alongside the packages
VERSION = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--tag", action="store_true", help="create the tag after the last step")
    mode.add_argument("--at-tag", metavar="TAG", help="build the release of an existing tag (used in CI)")
    parser.add_argument("--check-only", action="store_true", help="stop after step 1")
    parser.add_argument("--skip-tests", action="store_true", help="skip step 2; not allowed with --tag")
    parser.add_argument("--skip-sbom", action="store_true", help="don't write an SBOM; not allowed with --tag")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="output directory (default: dist)")
    options = parser.parse_args(argv)
    if options.tag and (options.skip_tests or options.skip_sbom or options.check_only):
        parser.error("--tag requires all steps; remove --check-only, --skip-tests and --skip-sbom")

    version = project_version(ROOT)
    problems = list(release_problems(ROOT, version, options.at_tag))
    if problems:
        sys.exit("\n".join(f"release: {problem}" for problem in problems))
    report(f"cellama {version}: the working tree, the changelog and the tag are ready for a release")
    if options.check_only:
        return
    if not options.skip_tests:
        subprocess.run([ROOT / ".ci" / "run"], check=True)

    output = options.output.resolve()
    clear_output(output)
    with tempfile.TemporaryDirectory(prefix="cellama-release-") as source:
        export_commit(ROOT, Path(source))
        packages = build(Path(source), output, commit_time(ROOT))
    (output / "NOTES.md").write_text(changelog_section(ROOT, version) + "\n")
    if not options.skip_sbom:
        [wheel] = (file for file in packages if file.suffix == ".whl")
        write_sbom(wheel, output / "sbom.cdx.json", commit_time(ROOT))
    write_sums(output)
    report((output / "SHA256SUMS").read_text().rstrip())

    if options.tag:
        message = f"cellama {version}\n\n{changelog_section(ROOT, version)}"
        git(ROOT, "tag", "--annotate", "--cleanup=verbatim", "--message", message, f"v{version}")
        report(f"created the tag v{version}; publish it with: git push origin v{version}")
    elif not options.at_tag:
        report(f"dry run: no tag was created; create v{version} with: .ci/release.py --tag")


def report(line: str) -> None:
    print(line, flush=True)


def git(root: Path, *arguments: str) -> str:
    """Return the output of a git command. Raises CalledProcessError if the command fails."""
    done = subprocess.run(["git", "-C", str(root), *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def project_version(root: Path) -> str:
    """Return the version in pyproject.toml, the only file that contains it."""
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return version


def commit_time(root: Path) -> int:
    """Return the commit time in seconds since 1970, which is the value of SOURCE_DATE_EPOCH."""
    return int(git(root, "log", "-1", "--format=%ct"))


def changelog_section(root: Path, version: str) -> str:
    """Return the text below the heading of a version, or an empty string if there is none."""
    pattern = rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## |^\[[^\]]+\]: |\Z)"
    found = re.search(pattern, (root / "CHANGELOG.md").read_text(), re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def release_problems(root: Path, version: str, at_tag: str | None = None) -> Iterator[str]:
    """Yield each problem that prevents a release of this checkout, with its remedy."""
    if not VERSION.fullmatch(version):
        yield f"pyproject.toml: version '{version}' is not a release; use for example 1.2.0 or 1.2.0rc1"
    if changed := git(root, "status", "--porcelain"):
        yield f"working tree: {len(changed.splitlines())} files are not committed; commit or remove them"
    yield from changelog_problems(root, version)
    yield from branch_problems(root, version) if at_tag is None else tag_problems(root, version, at_tag)


def changelog_problems(root: Path, version: str) -> Iterator[str]:
    heading = re.search(rf"^## \[{re.escape(version)}\](.*)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    if heading is None:
        yield f"CHANGELOG.md: it has no section for {version}; add '## [{version}] - YYYY-MM-DD'"
        return
    if not re.fullmatch(r" - \d{4}-\d\d-\d\d", heading[1]):
        yield f"CHANGELOG.md: '{heading[0]}' has no date; write '## [{version}] - YYYY-MM-DD'"
    if not changelog_section(root, version):
        yield f"CHANGELOG.md: the section of {version} is empty; list what users notice"


def branch_problems(root: Path, version: str) -> Iterator[str]:
    if (branch := git(root, "branch", "--show-current")) != "main":
        yield f"branch: '{branch or 'detached HEAD'}' is not main; run git switch main"
    remote = git(root, "for-each-ref", "--format=%(objectname)", "refs/remotes/origin/main")
    if remote and remote != git(root, "rev-parse", "HEAD"):
        yield "branch: main differs from origin/main; pull or push first"
    if git(root, "tag", "--list", f"v{version}"):
        yield f"tag: v{version} already exists; increase the version in pyproject.toml"


def tag_problems(root: Path, version: str, tag: str) -> Iterator[str]:
    if tag != f"v{version}":
        yield f"tag: '{tag}' does not match version {version} in pyproject.toml; use v{version}"
    elif git(root, "tag", "--points-at", "HEAD", "--list", tag) != tag:
        yield f"tag: '{tag}' does not point to this commit; run git switch --detach {tag}"


def clear_output(output: Path) -> None:
    """Remove the files of an earlier run. Exits if the directory contains files that are not part of a release."""
    old = [file for file in output.glob("*") if file.name.startswith("cellama-") or file.name in OTHER_FILES]
    if foreign := sorted({*output.glob("*")} - {*old}):
        sys.exit(f"release: output: {output} contains {foreign[0].name}; choose an empty directory")
    for file in old:
        file.unlink()


def export_commit(root: Path, target: Path) -> None:
    """Write only the committed files into `target`, so that the packages contain no other files."""
    archive = target / "commit.tar"
    git(root, "-c", "tar.umask=0022", "archive", "--output", str(archive), "HEAD")  # modes are part of the packages
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")
    archive.unlink()


def build(source: Path, output: Path, epoch: int) -> list[Path]:
    """Build the sdist, and the wheel from the sdist, into `output`. All files get the modification time `epoch`."""
    python = environment("build", BUILD_TOOLS)
    variables = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    argv = [python, "-m", "build", "--outdir", str(output), str(source)]
    done = subprocess.run(argv, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, umask=0o022)
    if done.returncode:
        sys.exit(f"{done.stdout}\nrelease: building the packages failed; see the output above")
    for sdist in output.glob("*.tar.gz"):
        normalize_sdist(sdist, epoch)
    return sorted(output.glob("cellama-*"))


def normalize_sdist(sdist: Path, epoch: int) -> None:
    """Rewrite an sdist so that its members are sorted, share one timestamp and have no owner."""
    with tarfile.open(sdist) as old:
        members = [(member, old.extractfile(member)) for member in sorted(old, key=lambda member: member.name)]
        new = sdist.with_suffix(".new")
        with (
            new.open("wb") as raw,
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=epoch) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for member, content in members:
                member.mtime, member.pax_headers = epoch, {}
                member.uid = member.gid = 0
                member.uname = member.gname = ""
                tar.addfile(member, content)
    new.replace(sdist)


def environment(name: str, requirements: tuple[str, ...]) -> str:
    """Return the Python interpreter of a virtual environment below build/ in which these packages are installed."""
    folder = ROOT / "build" / f"release-{name}"
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        venv.create(folder, with_pip=True)
    pip(python, python, *requirements)
    return python


def pip(python: str, target: str, *arguments: str) -> None:
    """Install packages into the environment of the interpreter `target`, using pip from the interpreter `python`."""
    quiet = ("--quiet", "--disable-pip-version-check")
    subprocess.run([python, "-m", "pip", "--python", target, "install", *quiet, *arguments], check=True)


def write_sbom(wheel: Path, output: Path, epoch: int) -> None:
    """Write the CycloneDX SBOM of a complete installation of the wheel, with the versions that the tests use."""
    tools = environment("sbom", SBOM_TOOLS)
    with tempfile.TemporaryDirectory(prefix="cellama-sbom-") as folder:
        venv.create(folder, with_pip=False)
        target = str(Path(folder) / "bin" / "python")
        pip(tools, target, "--constraint", str(ROOT / "constraints.txt"), f"{wheel}[{SBOM_EXTRAS}]")
        argv = [tools, "-m", "cyclonedx_py", "environment", "--pyproject", str(ROOT / "pyproject.toml")]
        argv += ["--output-reproducible", "--short-PURLs", "--of", "JSON", "--output-file", str(output), target]
        subprocess.run(argv, check=True, env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)})


def write_sums(output: Path) -> None:
    """Write SHA256SUMS, which `sha256sum --check` reads, for all files in `output`."""
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in sorted(output.iterdir())]
    (output / "SHA256SUMS").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
