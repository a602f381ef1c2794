"""The control groups that this process is in: where the limits of a container lie. cgroups v1 and v2."""

from __future__ import annotations

from pathlib import Path

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def folders(controller: str, root: Path = CGROUPS, own: Path = OWN) -> list[Path]:
    """The groups of a controller that this process is in, and those around them: a container's lies at the root."""
    try:
        lines = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return []
    found: dict[Path, None] = {}
    for _, controllers, path in lines:
        if controllers == "" or controller in controllers.split(","):
            base = root / controller if controllers else root
            inner = base / path.lstrip("/")
            around = [folder for folder in inner.parents if folder.is_relative_to(base)]
            found |= dict.fromkeys([inner, *around])
    return list(found)


def text_of(path: Path) -> str | None:
    """What a file of a group says; None if it is not there."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
