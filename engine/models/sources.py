"""Resolve a model's source string to a GGUF file on this machine.

A source is a path, `bundled://NAME`, or `hf://ORG/REPO/FILE[@REVISION]` on the Hugging Face Hub. FILE can be a pattern
such as *Q4_K_M*. To refer to a split model, use the path of its first part. huggingface_hub downloads and caches files,
resumes downloads, and shows progress. This module verifies the checksums of new files.
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

BUNDLED = {"tiny": TINY_PATH, "pirate": PIRATE_PATH}  # `pirate` is an adapter for `tiny`
HUB_PREFIX = "hf://"
_MAGIC = b"GGUF"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 20  # bytes hashed at once
_CONNECT_TIMEOUT_S = 5.0  # seconds after which the hub counts as unreachable; its client would retry for half a minute
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class HubOptions:
    """Options for downloads from the Hub. Without `token`, the token from HF_TOKEN or `hf auth login` is used."""

    cache_dir: str | None = None
    token: str | None = field(default=None, repr=False)
    force: bool = False  # download files even if the cache has them
    offline: bool = False  # use the cache only


@dataclass(frozen=True, slots=True)
class HubFile:
    """The components of an `hf://` source. `file` can be a pattern."""

    repo: str
    file: str
    revision: str | None

    @classmethod
    def parse(cls, source: str) -> HubFile:
        """Parse hf://ORG/REPO/FILE[@REVISION]. Raises ModelLoadFailed."""
        path, _, revision = source.removeprefix(HUB_PREFIX).partition("@")
        parts = path.split("/", 2)
        if len(parts) < 3 or not all(parts):
            raise ModelLoadFailed(
                f"{source!r} does not name a file on the Hub; use hf://ORG/REPO/FILE.gguf, or a pattern "
                "such as hf://ORG/REPO/*Q4_K_M*"
            )
        return cls("/".join(parts[:2]), parts[2], revision or None)

    @property
    def is_pattern(self) -> bool:
        return any(character in self.file for character in "*?[")


def resolve(source: str, hub_options: HubOptions = HubOptions()) -> Path:
    """Resolve a path, `bundled://NAME` or `hf://ORG/REPO/FILE` to a file, and check it. Raises ModelLoadFailed."""
    if source.startswith("bundled://"):
        return _bundled(source.removeprefix("bundled://"))
    if source.startswith(HUB_PREFIX):
        return _check(download(source, hub_options))
    if "://" in source:
        raise ModelLoadFailed(
            f"{source!r} has an unknown scheme; use a path to a GGUF file, hf://ORG/REPO/FILE, or bundled://tiny"
        )
    return _check(Path(source).expanduser())


def check_source(source: str) -> None:
    """Raise ModelLoadFailed if this source definitely can't be loaded. Nothing is downloaded."""
    if source.startswith(HUB_PREFIX):
        HubFile.parse(source)
    else:
        resolve(source)


def with_draft_file(options: EngineOptions, hub_options: HubOptions) -> EngineOptions:
    """Return the options with the draft model's source replaced by the path of its file. Raises ModelLoadFailed."""
    if options.draft is None:
        return options
    try:
        return replace(options, draft=str(resolve(options.draft, hub_options)))
    except ModelLoadFailed as error:
        raise ModelLoadFailed(f"draft model: {error}") from None


def _bundled(name: str) -> Path:
    if name not in BUNDLED:
        raise ModelLoadFailed(f"bundled file {name!r} does not exist; {nearest(name, BUNDLED)}")
    return _check(BUNDLED[name])


def _check(path: Path) -> Path:
    if not path.exists():
        raise ModelLoadFailed(f"{str(path)!r} does not exist; check the path, or download the GGUF file first")
    if path.is_dir():
        files = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"choose one of its files: {', '.join(files)}" if files else "it contains no .gguf file"
        raise ModelLoadFailed(f"{str(path)!r} is a directory; {hint}")
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise ModelLoadFailed(f"{str(path)!r} can't be read: {error.strerror}") from None
    if magic != _MAGIC:
        raise ModelLoadFailed(
            f"{str(path)!r} is not a GGUF file (it starts with {magic!r}); convert it, or download a GGUF version"
        )
    return path


# The hub


def download(source: str, options: HubOptions) -> Path:
    """Download all parts of a source to the cache, and return the path of the first part. Raises ModelLoadFailed."""
    hub_file = HubFile.parse(source)
    try:
        from huggingface_hub import errors
    except ImportError:
        raise ModelLoadFailed(f"{source!r} requires huggingface_hub; run pip install 'cellama[worker]'") from None
    try:
        name = _match(hub_file, options) if hub_file.is_pattern else hub_file.file
        first, *_ = [_download(hub_file, part, options) for part in part_names(name)]
        return first
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.HFValidationError, OSError) as error:
        _raise_load_failed(source, hub_file, error, offline=options.offline)
    except Exception as error:  # from the hub's HTTP client, whose exceptions differ between major versions
        if not any(kind.__name__ == "TransportError" for kind in type(error).__mro__):
            raise
        raise ModelLoadFailed(f"{source!r} can't be downloaded: {_unreachable(str(error) or repr(error))}") from None


def _match(hub_file: HubFile, options: HubOptions) -> str:
    """Return the GGUF file that matches a pattern, or the first part of the matching split model.

    Raises ModelLoadFailed unless exactly one model matches.
    """
    if options.offline:
        raise ModelLoadFailed(
            f"{hub_file.file!r} is a pattern, which requires the Hub's list of files; specify a file name, or go online"
        )
    from huggingface_hub import HfApi

    _check_reachable()
    api = HfApi(endpoint=_endpoint(), token=options.token)
    files = sorted(f for f in api.list_repo_files(hub_file.repo, revision=hub_file.revision) if f.endswith(".gguf"))
    firsts = [file for file in files if is_first_part(file)]
    found = [file for file in firsts if fnmatch.fnmatch(file, hub_file.file)]
    if len(found) != 1:
        problem = "matches several files" if found else "matches no GGUF file"
        listed = ", ".join(found or firsts) or "none"
        raise ModelLoadFailed(f"{hub_file.file!r} {problem} of {hub_file.repo}: {listed}; choose one")
    return found[0]


def _download(hub_file: HubFile, name: str, options: HubOptions) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(hub_file.repo, name, cache_dir=options.cache_dir, revision=hub_file.revision)
    if not isinstance(cached, str) and not options.offline:
        _check_reachable()
    path = Path(
        hf_hub_download(
            hub_file.repo,
            name,
            revision=hub_file.revision,
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
    """Verify the checksum of a new file.

    The Hub provides checksums for large files, and the cache uses these checksums as file names.
    """
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
            f"{path.name} was damaged during the download: its SHA-256 is {digest.hexdigest()} instead of {blob.name}; "
            "the file has been deleted, so load the model again"
        )


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _check_reachable() -> None:
    """Raise OSError if the Hub doesn't accept connections.

    Without this check, the Hub's client would retry for half a minute.
    """
    from huggingface_hub import constants

    url = urlsplit(_endpoint() or constants.ENDPOINT)
    if getproxies() or not url.hostname:
        return  # the proxy may reach the hub
    try:
        socket.create_connection((url.hostname, url.port or _PORTS[url.scheme]), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise OSError(_unreachable(str(error))) from None


def _unreachable(reason: str) -> str:
    """Return the error message to use when the Hub is unreachable."""
    from huggingface_hub import constants

    return (
        f"{_endpoint() or constants.ENDPOINT} is unreachable ({reason}); connect to the internet, set HF_ENDPOINT to a "
        "mirror, or copy the file to this machine and use its path"
    )


def _raise_load_failed(source: str, hub_file: HubFile, error: Exception, *, offline: bool) -> NoReturn:
    """Raise ModelLoadFailed for an error raised by the Hub's client, and suggest a remedy."""
    from huggingface_hub import errors

    token = "set HF_TOKEN, or the model's hub_token, to a token with read access"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        reason = f"{hub_file.repo} is gated: accept its terms on the hub, and {token}"
    elif status in (401, 403):
        reason = f"the hub denies access to {hub_file.repo} ({status}); {token}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = f"{hub_file.repo} does not exist on the hub, or is private; check the name, or {token}"
    elif isinstance(error, errors.RevisionNotFoundError):
        reason = f"{hub_file.repo} has no revision {hub_file.revision!r}; check the revision"
    elif isinstance(error, errors.RemoteEntryNotFoundError):
        reason = f"{hub_file.repo} has no file {hub_file.file!r}; hf://{hub_file.repo}/* lists its files"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        reason = "it is not in the cache" + ("; disable hub_offline, or use a path" if offline else "")
        reason += "" if offline else f", and {_unreachable('no response')}"
    else:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
    raise ModelLoadFailed(f"{source!r} can't be downloaded: {reason}") from None
