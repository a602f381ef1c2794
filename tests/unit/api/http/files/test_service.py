"""Test files: the separation of tenants, expiry, quotas and stores."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from redis.asyncio import Redis

from cellama.api.http.auth import Caller
from cellama.api.http.errors import ApiError
from cellama.api.http.files.records import MAX_LIFE_S, FileQuota, RecordStore
from cellama.api.http.files.service import FileService, file_view
from cellama.api.http.files.store import (
    DirectoryStore,
    FileStore,
    UrlStore,
    blocks_of,
    download,
    ensure_store_id,
    read_store_id,
    store_of,
)
from cellama.config import Settings, SettingsError
from cellama.tasks.contract.keys import http_record_key, http_records_key

from .....conftest import PATIENCE_S
from ..conftest import Run

ACME, OTHER = Caller("acme"), Caller("other")


@pytest.fixture
def local(tmp_path: Path) -> Path:
    path = tmp_path / "local"
    path.write_bytes(b"{}\n" * 1000)
    return path


def test_open_returns_the_last_stored_contents(store: FileStore, local: Path) -> None:
    store.put(local, "parts/batch_1/a")
    local.unlink()
    local.write_bytes(b"other")
    store.put(local, "parts/batch_1/a")
    assert b"".join(blocks_of(store.open("parts/batch_1/a"))) == b"other"
    store.delete("parts/batch_1/a")
    store.delete("parts/batch_1/a")
    with pytest.raises(FileNotFoundError):
        store.open("parts/batch_1/a")


def test_delete_directory_deletes_all_files_in_it(store: FileStore, local: Path) -> None:
    for name in ("parts/batch_1/a", "parts/batch_1/b", "parts/batch_2/a"):
        store.put(local, name)
    store.delete_directory("parts/batch_1")
    store.delete_directory("parts/batch_1")
    with pytest.raises(FileNotFoundError):
        store.open("parts/batch_1/b")
    store.open("parts/batch_2/a").close()


def test_store_id_is_stable_once_written(store: FileStore) -> None:
    assert read_store_id(store) is None
    assert not store.work_dir.exists()
    assert ensure_store_id(store) == ensure_store_id(store) == read_store_id(store)


def test_put_first_keeps_existing_contents(store: FileStore) -> None:
    store.put_first(b"one", "a/b")
    store.put_first(b"two", "a/b")
    assert b"".join(blocks_of(store.open("a/b"))) == b"one"


def test_gateways_agree_on_a_store_id_when_they_write_it_concurrently(tmp_path: Path) -> None:
    """Otherwise, batches of one gateway would name a store that no gateway has."""
    for number in range(20):
        moment, place = threading.Barrier(4), tmp_path / str(number)

        def give(moment: threading.Barrier = moment, place: Path = place) -> str:
            moment.wait(PATIENCE_S)
            return ensure_store_id(DirectoryStore(place))

        with ThreadPoolExecutor(4) as gateways:
            given = {received.result() for received in [gateways.submit(give) for _ in range(4)]}
        assert given == {read_store_id(DirectoryStore(place))}


def test_store_of_uses_the_directory_or_url_of_the_settings(tmp_path: Path) -> None:
    def store(**changed: object) -> FileStore:
        return store_of(Settings().model_copy(update={"data_dir": tmp_path, **changed}))

    assert store().work_dir == tmp_path / "gateway" / "work"
    named = store(gateway_files_dir=str(tmp_path / "shared"))
    assert (named.work_dir, named.shares_work) == (tmp_path / "shared" / "work", True)
    at_url = store(gateway_files_dir=f"file://{tmp_path}/bucket")
    assert (at_url.work_dir, at_url.shares_work) == (tmp_path / "gateway", False)
    at_url = store(gateway_files_dir=f"file://{tmp_path}/bucket", gateway_work_dir=tmp_path / "own")
    assert at_url.work_dir == tmp_path / "own"


def test_unsupported_url_error_names_the_package_to_install(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cellama\[files\]"):
        UrlStore("unknown-kind://a/b", tmp_path)


def test_file_returns_404_to_other_tenants(run: Run, store: FileStore, local: Path) -> None:
    from openai.types import FileObject

    async def scenario(redis: Redis) -> None:
        files = FileService(store, redis)
        record = await files.add(local, "a.jsonl", "batch", ACME, 3600)
        file = FileObject.model_validate(file_view(await files.records.find(record["id"], ACME)))
        assert (file.bytes, file.filename, file.purpose) == (3000, "a.jsonl", "batch")
        assert file.expires_at is not None
        assert 3600 <= file.expires_at - file.created_at <= 3601
        with pytest.raises(ApiError, match="404"):
            await files.records.find(record["id"], OTHER)
        assert b"".join(await files.blocks(record["id"])) == local.read_bytes()
        await files.delete(record)
        with pytest.raises(ApiError, match="404"):
            await files.records.find(record["id"], ACME)
        with pytest.raises(ApiError, match="404"):
            await files.blocks(record["id"])
        assert [key for key in await redis.keys("cellama:http:*") if b":of:" not in key] == []

    run(scenario)


def test_expired_file_returns_404_immediately_and_is_deleted_by_sweep(run: Run, store: FileStore, local: Path) -> None:
    async def scenario(redis: Redis) -> None:
        files = FileService(store, redis)
        deleted = await files.add(local, "a", "batch", ACME, -10)
        stored = await files.add(local, "a", "batch", ACME, 3600)
        with pytest.raises(ApiError, match="404"):
            await files.records.find(deleted["id"], ACME)
        list(await files.blocks(deleted["id"]))
        assert await files.sweep() == 1
        with pytest.raises(ApiError, match="404"):
            await files.blocks(deleted["id"])
        list(await files.blocks(stored["id"]))
        assert await files.sweep() == 0

    run(scenario)


def test_sweep_deletes_old_files_when_redis_has_lost_their_record(run: Run, tmp_path: Path, local: Path) -> None:
    async def scenario(redis: Redis) -> None:
        store = DirectoryStore(tmp_path / "store")
        files = FileService(store, redis)
        place = await files.store_id()
        lost = (await files.add(local, "a", "batch", ACME, 3600))["id"]
        local.unlink()
        local.write_bytes(b"{}")  # a new file, not a link to the previous one
        stored = (await files.add(local, "a", "batch", ACME, 3600))["id"]
        await redis.flushdb()
        for path in (tmp_path / "store" / "files").iterdir():
            if path.name != stored:
                os.utime(path, (0, 0))
        await files.sweep()
        list(await files.blocks(stored))
        with pytest.raises(ApiError, match="404"):
            await files.blocks(lost)
        assert await files.read_store_id() == place

    run(scenario)


def test_sweep_keeps_known_file_when_its_timestamp_is_wrong(run: Run, tmp_path: Path, local: Path) -> None:
    async def scenario(redis: Redis) -> None:
        files = FileService(DirectoryStore(tmp_path / "store"), redis)
        file_id = (await files.add(local, "a", "batch", ACME, 3600))["id"]
        os.utime(tmp_path / "store" / "files" / file_id, (0, 0))
        await files.sweep()
        list(await files.blocks(file_id))

    run(scenario)


class OutOfReach(fsspec.AbstractFileSystem):
    """A file system whose errors are not OSErrors."""

    protocol = "out-of-reach"

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("the bucket does not answer")

    put_file = pipe_file = rm_file = rm = makedirs = _fail

    def open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if path.endswith("broken"):
            return Broken()
        return self._fail()


class Broken(io.BytesIO):
    """A file that fails while it is read."""

    def read(self, size: int | None = -1, /) -> bytes:
        raise RuntimeError("the bucket does not answer any more")


def test_url_store_converts_all_errors_to_oserror(tmp_path: Path, local: Path) -> None:
    fsspec.register_implementation("out-of-reach", OutOfReach, clobber=True)
    store = UrlStore("out-of-reach://bucket", tmp_path)
    calls: list[Callable[[], Any]] = [
        lambda: store.put(local, "a/b"),
        lambda: store.put_first(b"one", "a/b"),
        lambda: store.open("a"),
        lambda: list(blocks_of(store.open("broken"))),
        lambda: store.delete("a"),
        lambda: store.delete_directory("a"),
    ]
    for call in calls:
        with pytest.raises(OSError, match="the bucket does not answer"):
            call()


def test_tenant_index_drops_entries_older_than_any_record(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        records = RecordStore(redis, "file")
        for number, created_at in enumerate((1000, 2000, 1500 + MAX_LIFE_S)):
            made = {"id": f"file-{number}", "tenant": "acme", "status": "processed", "created_at": created_at}
            await records.add(made, 3600)
        assert await redis.zrange("cellama:http:of:file:acme", 0, -1) == [b"file-1", b"file-2"]

    run(scenario)


def test_quota_is_exact_after_deletion_expiry_and_crash(run: Run, store: FileStore, local: Path) -> None:
    async def scenario(redis: Redis) -> None:
        files, size = FileService(store, redis), local.stat().st_size
        quota = FileQuota(max_files=3, max_bytes=3 * size)
        added = [await files.add(local, "a", "batch", ACME, 3600, quota=quota) for _ in range(3)]
        with pytest.raises(ApiError) as refused:
            await files.add(local, "a", "batch", ACME, 3600, quota=quota)
        assert (refused.value.status, refused.value.code) == (429, "file_quota_exceeded")
        await files.add(local, "answers", "batch_output", ACME, 3600)  # quotas only apply to uploads
        assert await files.records.usage(ACME) == (4, 4 * size)
        assert await files.records.usage(OTHER) == (0, 0)
        await files.delete(added[0])
        await redis.hset(http_record_key("file", added[1]["id"]), "gone_at", "1")  # type: ignore[misc]
        await redis.delete(http_record_key("file", added[2]["id"]))  # expired, or deleted by a gateway that died
        assert await files.records.usage(ACME) == (1, size)
        assert await redis.zcard(http_records_key("file", "acme")) == 2
        await files.add(local, "a", "batch", ACME, 3600, quota=quota)

    run(scenario)


def test_uploads_in_progress_count_against_the_quota(run: Run, store: FileStore) -> None:
    async def scenario(redis: Redis) -> None:
        files, quota = FileService(store, redis), FileQuota(max_files=9, max_bytes=100)
        async with files.count_upload(ACME, 60, quota):
            with pytest.raises(ApiError, match="2 files with 120 bytes"):
                async with files.count_upload(ACME, 60, quota):
                    pass
            async with files.count_upload(OTHER, 60, quota), files.count_upload(ACME, 40, quota):
                pass
        async with files.count_upload(ACME, 100, quota):
            pass

    run(scenario)


def test_hanging_disk_does_not_block_threads_that_queue_jobs(run: Run, tmp_path: Path, local: Path) -> None:
    is_reached, may_go_on = threading.Event(), threading.Event()

    class Hanging(DirectoryStore):
        def put(self, local: Path, name: str) -> None:
            is_reached.set()
            assert may_go_on.wait(PATIENCE_S)

    async def scenario(redis: Redis) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        adding = asyncio.create_task(FileService(Hanging(tmp_path), redis).add(local, "a", "batch", ACME, 3600))
        assert await asyncio.wait_for(asyncio.to_thread(is_reached.wait, PATIENCE_S), PATIENCE_S)
        assert not adding.done()
        may_go_on.set()
        await adding

    run(scenario)


def test_new_files_and_directories_are_private_to_the_user(tmp_path: Path, local: Path) -> None:
    root = tmp_path / "data" / "gateway"
    store = DirectoryStore(root)
    local.chmod(0o644)
    store.put(local, "parts/batch_1/a")
    ensure_store_id(store)
    download(store, "parts/batch_1/a", tmp_path / "copy")
    modes = {path: path.stat().st_mode & 0o777 for path in [root.parent, root, *root.rglob("*"), tmp_path / "copy"]}
    assert len(modes) == 8
    assert {path: mode for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == {}
