"""Where a model comes from: a source text → a GGUF file on this machine.

A source is a path, `bundled://NAME`, or `hf://ORG/REPO/FILE[@REVISION]` on the Hugging Face hub, where FILE may be a
pattern such as *Q4_K_M*, and the first part of a split model stands for all of them. huggingface_hub downloads,
resumes, keeps the cache and shows progress. Checksums of new files are checked here.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit
from urllib.request import getproxies

from cellama.engine.bundled import PIRATE_PATH, TINY_PATH
from cellama.engine.errors import ModelLoadFailed, nearest
from cellama.engine.options import EngineOptions
from cellama.engine.system.split_files import is_first_part, part_names

BUNDLED = {"tiny": TINY_PATH, "pirate": PIRATE_PATH}  # pirate is an adapter for tiny
HUB_PREFIX = "hf://"
_MAGIC = b"GGUF"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 20  # bytes that are hashed at once
_CONNECT_S = 5.0  # seconds until the hub counts as out of reach; its own client tries for half a minute
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class HubOptions:
    """How files are fetched. Without a token that of the environment (HF_TOKEN) or of `hf auth login` is used."""

    cache_dir: str | None = None
    token: str | None = field(default=None, repr=False)
    force: bool = False  # fetch again what is in the cache
    offline: bool = False  # use the cache only


@dataclass(frozen=True, slots=True)
class HubFile:
    """What a source names. `file` may be a pattern."""

    repo: str
    file: str
    revision: str | None

    @classmethod
    def parse(cls, source: str) -> HubFile:
        """From hf://ORG/REPO/FILE[@REVISION]. Raises ModelLoadFailed."""
        path, _, revision = source.removeprefix(HUB_PREFIX).partition("@")
        parts = path.split("/", 2)
        if len(parts) < 3 or not all(parts):
            raise ModelLoadFailed(
                f"source {source!r} names no file on the hub; write hf://ORG/REPO/FILE.gguf, or a pattern such as "
                "hf://ORG/REPO/*Q4_K_M*"
            )
        return cls("/".join(parts[:2]), parts[2], revision or None)

    @property
    def is_pattern(self) -> bool:
        return any(character in self.file for character in "*?[")


def resolve(source: str, hub_options: HubOptions = HubOptions()) -> Path:
    """The checked file of `bundled://NAME`, `hf://ORG/REPO/FILE` or a path. Raises ModelLoadFailed with a remedy."""
    if source.startswith("bundled://"):
        return _bundled(source.removeprefix("bundled://"))
    if source.startswith(HUB_PREFIX):
        return _check(fetch(source, hub_options))
    if "://" in source:
        raise ModelLoadFailed(
            f"source {source!r} is of no known kind; give a path to a GGUF file, hf://ORG/REPO/FILE, or bundled://tiny"
        )
    return _check(Path(source).expanduser())


def check_source(source: str) -> None:
    """Raise ModelLoadFailed if no load of this source can succeed. Nothing is fetched from the hub."""
    if source.startswith(HUB_PREFIX):
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


# The hub


def fetch(source: str, options: HubOptions) -> Path:
    """The (first) file of a source, after all of its parts are in the cache. Raises ModelLoadFailed."""
    wanted = HubFile.parse(source)
    try:
        from huggingface_hub import errors
    except ImportError:
        raise ModelLoadFailed(f"source {source!r} needs huggingface_hub; pip install 'cellama[worker]'") from None
    try:
        name = _match(wanted, options) if wanted.is_pattern else wanted.file
        first, *_ = [_download(wanted, part, options) for part in part_names(name)]
        return first
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.HFValidationError, OSError) as error:
        _explain(source, wanted, error, offline=options.offline)
    except Exception as error:  # of the hub's HTTP client, which has another name in each major version
        if not any(kind.__name__ == "TransportError" for kind in type(error).__mro__):
            raise
        raise ModelLoadFailed(f"{source!r} can't be fetched: {_away(str(error) or repr(error))}") from None


def _match(wanted: HubFile, options: HubOptions) -> str:
    """The one GGUF file, or the first part of the one split model, that fits a pattern."""
    if options.offline:
        raise ModelLoadFailed(
            f"{wanted.file!r} is a pattern, and offline there is no list of files that it could fit; name the file"
        )
    from huggingface_hub import HfApi

    _check_reachable()
    api = HfApi(endpoint=_endpoint(), token=options.token)
    files = sorted(f for f in api.list_repo_files(wanted.repo, revision=wanted.revision) if f.endswith(".gguf"))
    firsts = [file for file in files if is_first_part(file)]
    found = [file for file in firsts if fnmatch.fnmatch(file, wanted.file)]
    if len(found) != 1:
        many = "fits several files" if found else "fits no GGUF file"
        listed = ", ".join(found or firsts) or "none"
        raise ModelLoadFailed(f"{wanted.file!r} {many} of {wanted.repo}: {listed}; name one")
    return found[0]


def _download(wanted: HubFile, name: str, options: HubOptions) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(wanted.repo, name, cache_dir=options.cache_dir, revision=wanted.revision)
    if not isinstance(cached, str) and not options.offline:
        _check_reachable()
    path = Path(
        hf_hub_download(
            wanted.repo,
            name,
            revision=wanted.revision,
            cache_dir=options.cache_dir,
            token=options.token,
            force_download=options.force,
            local_files_only=options.offline,
            endpoint=_endpoint(),
        )
    )
    if options.force or not isinstance(cached, str):
        _verify(path)
    return path


def _verify(path: Path) -> None:
    """Checks a new file against its checksum, which the hub gives for large files, and the cache uses as its name."""
    blob = path.resolve()
    if not _SHA256.fullmatch(blob.name):
        return
    digest = hashlib.sha256()
    with blob.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != blob.name:
        path.unlink()
        blob.unlink(missing_ok=True)
        raise ModelLoadFailed(
            f"{path.name} came damaged from the hub: its SHA-256 is {digest.hexdigest()} instead of {blob.name}; "
            "it was deleted, load it again"
        )


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _check_reachable() -> None:
    """Raises OSError when nothing listens where the hub should be: its client would try again for half a minute."""
    from huggingface_hub import constants

    where = urlsplit(_endpoint() or constants.ENDPOINT)
    if getproxies() or not where.hostname:
        return  # who knows what the proxy reaches
    try:
        socket.create_connection((where.hostname, where.port or _PORTS[where.scheme]), _CONNECT_S).close()
    except OSError as error:
        raise OSError(_away(str(error))) from None


def _away(said: str) -> str:
    """What to do when the hub can't be reached."""
    from huggingface_hub import constants

    return (
        f"this machine does not reach {_endpoint() or constants.ENDPOINT} ({said}); go online, set HF_ENDPOINT to a "
        "mirror, or copy the file here and name its path"
    )


def _explain(source: str, wanted: HubFile, error: Exception, *, offline: bool) -> NoReturn:
    """Raises ModelLoadFailed for what the hub's client says, with a remedy."""
    from huggingface_hub import errors

    token = "set HF_TOKEN, or hub_token of the model, to one that may read it"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        reason = f"{wanted.repo} is gated: accept its terms on the hub, and {token}"
    elif status in (401, 403):
        reason = f"the hub refuses access to {wanted.repo} ({status}); {token}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = f"there is no {wanted.repo} on the hub, or it is private; check the name, or {token}"
    elif isinstance(error, errors.RevisionNotFoundError):
        reason = f"{wanted.repo} has no revision {wanted.revision!r}"
    elif isinstance(error, errors.RemoteEntryNotFoundError):
        reason = f"{wanted.repo} has no file {wanted.file!r}; hf://{wanted.repo}/* lists what it has"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        reason = "it is not in the cache" + ("; load it without offline, or name a path" if offline else "")
        reason += "" if offline else f", and {_away('nothing came')}"
    else:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
    raise ModelLoadFailed(f"{source!r} can't be fetched: {reason}") from None
