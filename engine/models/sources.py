"""Where a model comes from: a source text → a GGUF file on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cellama.engine.bundled import PIRATE_PATH, TINY_PATH
from cellama.engine.errors import ModelLoadFailed, nearest
from cellama.engine.options import EngineOptions

from . import hub
from .hub import HubFile, HubOptions

BUNDLED = {"tiny": TINY_PATH, "pirate": PIRATE_PATH}  # pirate is an adapter for tiny
_MAGIC = b"GGUF"


def resolve(source: str, hub_options: HubOptions = HubOptions()) -> Path:  # noqa: B008  (it is frozen)
    """The checked file of `bundled://NAME`, `hf://ORG/REPO/FILE` or a path. Raises ModelLoadFailed with a remedy."""
    if source.startswith("bundled://"):
        return _bundled(source.removeprefix("bundled://"))
    if source.startswith(hub.PREFIX):
        return _check(hub.fetch(source, hub_options))
    if "://" in source:
        raise ModelLoadFailed(
            f"source {source!r} is of no known kind; give a path to a GGUF file, hf://ORG/REPO/FILE, or bundled://tiny"
        )
    return _check(Path(source).expanduser())


def check_source(source: str) -> None:
    """Raise ModelLoadFailed if no load of this source can succeed. Nothing is fetched from the hub."""
    if source.startswith(hub.PREFIX):
        HubFile.parse(source)
    else:
        resolve(source)


def with_draft_file(options: EngineOptions, hub_options: HubOptions) -> EngineOptions:
    """The options, with the file of their draft model in the place of its source. Raises ModelLoadFailed."""
    if options.draft is None:
        return options
    try:
        return replace(options, draft=str(resolve(options.draft, hub_options)))
    except ModelLoadFailed as error:
        raise ModelLoadFailed(f"draft model: {error}") from None


def _bundled(name: str) -> Path:
    if name not in BUNDLED:
        raise ModelLoadFailed(f"no bundled file is called {name!r}; {nearest(name, BUNDLED)}")
    return _check(BUNDLED[name])


def _check(path: Path) -> Path:
    if not path.exists():
        raise ModelLoadFailed(f"there is no model file at {str(path)!r}; check the path, or fetch the GGUF file first")
    if path.is_dir():
        files = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"name one of its files: {', '.join(files)}" if files else "it holds no .gguf file"
        raise ModelLoadFailed(f"{str(path)!r} is a folder; {hint}")
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise ModelLoadFailed(f"{str(path)!r} can't be read: {error.strerror}") from None
    if magic != _MAGIC:
        raise ModelLoadFailed(
            f"{str(path)!r} is no GGUF file (it begins with {magic!r}); convert it, or fetch a GGUF version"
        )
    return path
