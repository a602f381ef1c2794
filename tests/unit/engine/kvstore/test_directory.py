"""Tests of the shared directory: quota, eviction, pins, files of dead writers, and permissions."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from pathlib import Path

import pytest

from cellama.engine.kvstore import directory as directory_module
from cellama.engine.kvstore.directory import DirectoryFull, StateDirectory

OLD = 1_000_000_000  # Unix seconds


def key(number: int) -> str:
    return f"{number:064x}"


def put(
    folder: StateDirectory, number: int, size: int = 100, *, used: int | None = None, identity: bytes = b"a"
) -> Path:
    """Create a file with this key."""
    directory = folder.directory_of(identity)
    folder.prepare(directory)
    file = folder.create(directory, size)
    path = file.publish(key(number))
    file.close()
    os.utime(path, (OLD + (number if used is None else used),) * 2)
    return path


def numbers(folder: StateDirectory) -> list[int]:
    return [int(file.key, 16) for file in folder.states()]


def test_least_recently_used_unpinned_states_of_all_models_are_evicted_first(tmp_path: Path) -> None:
    folder = StateDirectory(tmp_path / "kv", 400)
    for number, identity in enumerate((b"a", b"b", b"a", b"b"), start=1):
        put(folder, number, identity=identity)
    assert folder.pin(key(1))
    os.utime(folder.find(key(2))[0])
    put(folder, 5, 150, identity=b"c")
    assert numbers(folder) == [1, 5, 2]
    assert folder.num_evictions == 2
    assert folder.unpin(key(1))
    assert not folder.unpin(key(1))
    put(folder, 6, 150, identity=b"c")
    assert numbers(folder) == [5, 6, 2]


def test_file_larger_than_the_quota_is_evicted_first(tmp_path: Path) -> None:
    folder = StateDirectory(tmp_path, 400)
    put(folder, 1)
    os.truncate(put(folder, 2), 1 << 40)
    put(folder, 3)
    assert numbers(folder) == [1, 3]


def test_create_fails_when_pinned_and_unfinished_files_fill_the_quota(tmp_path: Path) -> None:
    folder = StateDirectory(tmp_path, 300)
    put(folder, 1)
    folder.pin(key(1))
    file = folder.create(folder.directory_of(b"a"), 150)
    for size in (301, 51):
        with pytest.raises(DirectoryFull):
            folder.create(folder.directory_of(b"a"), size)
    assert numbers(folder) == [1]
    file.close()
    folder.create(folder.directory_of(b"a"), 200).close()


def test_files_and_directories_are_accessible_only_to_their_owner(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = put(StateDirectory(tmp_path / "kv", 1000), 1)
    finally:
        os.umask(before)
    modes = [oct(there.stat().st_mode & 0o777) for there in (path, path.parent, tmp_path / "kv")]
    assert modes == ["0o600", "0o700", "0o700"]


def test_prepare_removes_files_of_dead_writers_and_keeps_other_files(tmp_path: Path) -> None:
    folder = StateDirectory(tmp_path, 1000)
    path = put(folder, 1)
    left = path.with_name(".0123456789abcdef.tmp")
    left.write_bytes(b"half")
    kept = {path.with_name(name) for name in ("notes.txt", "x.tmp", "short.pin", ".0123456789abcdef.tmp.bak")}
    for other in kept:
        other.touch()
    writing = folder.create(path.parent, 10)
    StateDirectory(tmp_path, 1000).prepare(path.parent)
    assert set(path.parent.iterdir()) == {path, writing.path, *kept}
    writing.close()


@pytest.mark.parametrize("how", ["link", "open", "file"])
def test_prepare_rejects_a_directory_that_other_users_can_write_to(tmp_path: Path, how: str) -> None:
    folder = StateDirectory(tmp_path, 1000)
    directory = folder.directory_of(b"a")
    if how == "link":
        directory.symlink_to(tmp_path, target_is_directory=True)
    elif how == "open":
        directory.mkdir()
        directory.chmod(0o777)
    else:
        directory.touch()
    with pytest.raises(PermissionError, match="only this user can write to"):
        folder.prepare(directory)


@pytest.mark.parametrize("text", ["", "../../etc/passwd", "A" * 64, "a" * 64 + "/..", "a" * 64 + "\n"])
def test_string_that_is_not_a_key_never_becomes_a_path(tmp_path: Path, text: str) -> None:
    folder = StateDirectory(tmp_path, 1000)
    for action in (folder.find, folder.pin, folder.unpin):
        with pytest.raises(ValueError, match="is not a valid key"):
            action(text)


def test_links_and_directories_named_like_states_are_ignored(tmp_path: Path) -> None:
    folder = StateDirectory(tmp_path, 1000)
    path = put(folder, 1)
    path.with_name(key(2) + ".kv").symlink_to(path)
    path.with_name(key(3) + ".kv").mkdir()
    assert numbers(folder) == [1]
    assert not folder.find(key(2))
    assert not folder.pin(key(3))


def test_lock_times_out_when_another_process_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "LOCK_TIMEOUT_S", 0.0)
    folder = StateDirectory(tmp_path, 1000)
    put(folder, 1)
    with folder.locked(), pytest.raises(TimeoutError, match="another process has locked"):
        StateDirectory(tmp_path, 1000).create(folder.directory_of(b"a"), 1)


def test_remove_also_removes_the_pin(tmp_path: Path) -> None:
    folder = StateDirectory(tmp_path, 1000)
    path = put(folder, 1)
    folder.pin(key(1))
    assert folder.remove([path, path.with_name(key(2) + ".kv")]) == 1
    assert not list(path.parent.iterdir())


def test_missing_directory_has_no_states(tmp_path: Path) -> None:
    folder = StateDirectory(tmp_path / "none", 1000)
    assert folder.states() == folder.find(key(1)) == []
    assert not folder.pin(key(1))
    assert folder.remove([]) == 0
    assert not (tmp_path / "none").exists()


def test_quota_is_respected_while_threads_write_concurrently(tmp_path: Path) -> None:
    folders = [StateDirectory(tmp_path, 1000) for _ in range(4)]
    most = []

    def write(first: int) -> None:
        for number in range(first, first + 20):
            put(folders[first // 100], number, 90 + number % 50, identity=bytes([number % 3]))
            with folders[0].locked():
                sizes: dict[int, int] = {}
                for path in tmp_path.glob("*/*"):
                    with contextlib.suppress(FileNotFoundError):  # another thread has just renamed it
                        sizes[path.stat().st_ino] = path.stat().st_size
                most.append(sum(sizes.values()))

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) <= 1000
    assert not list(tmp_path.glob("*/.*.tmp"))


def test_unfinished_file_is_locked_until_it_is_closed(tmp_path: Path) -> None:
    folder = StateDirectory(tmp_path, 1000)
    folder.prepare(folder.directory_of(b"a"))
    file = folder.create(folder.directory_of(b"a"), 10)
    with file.path.open("rb") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.close()
    assert not file.path.exists()
