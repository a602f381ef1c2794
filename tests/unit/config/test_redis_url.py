"""The URL of Redis is parsed and converted for its clients, and errors never contain its passwords."""

from __future__ import annotations

import pytest
from redis import UnixDomainSocketConnection
from redis.sentinel import SentinelConnectionPool

from cellama.config import mask_url
from cellama.config.redis_url import parse_redis_url
from cellama.tasks.connection.connections import broker_options, connect, connect_async, database_of, transport_options

SENTINELS = "sentinel://me:s%40cret@one:1;sentinel://two/3?master_name=main&sentinel_password=s%40cret"


@pytest.mark.parametrize(
    ("url", "broker"),
    [
        ("redis://h", "redis://h:6379/0"),
        ("redis://:s%40cret@[::1]:5/2", "redis://:s%40cret@[::1]:5/2"),
        ("rediss://me:s%40cret@h/1?ssl_ca_certs=/ca.pem", "rediss://me:s%40cret@h:6379/1"),
        ("unix:///run/redis.sock?db=2", "redis+socket:///run/redis.sock?virtual_host=2"),
        ("redis+socket://:s%40cret@/a.sock?virtual_host=2", "redis+socket://:s%40cret@/a.sock?virtual_host=2"),
        (SENTINELS, "sentinel://me:s%40cret@one:1/3;sentinel://me:s%40cret@two:26379/3"),
        (SENTINELS.replace(";sentinel://", ";"), "sentinel://me:s%40cret@one:1/3;sentinel://me:s%40cret@two:26379/3"),
    ],
)
def test_each_kind_of_redis_url_is_converted_for_celery(url: str, broker: str) -> None:
    assert broker_options(url)["broker_url"] == broker
    assert "cret" not in mask_url(url) + repr(parse_redis_url(url))


def test_clients_use_database_user_and_master_from_the_url() -> None:
    for client in (connect(SENTINELS), connect_async(SENTINELS)):
        known = client.connection_pool.connection_kwargs
        assert (database_of(client), known["username"], known["password"]) == (3, "me", "s@cret")
    sync = connect(SENTINELS)
    assert isinstance(sync.connection_pool, SentinelConnectionPool)
    assert sync.connection_pool.service_name == "main"
    sentinels = sync.connection_pool.sentinel_manager.sentinels
    assert [s.connection_pool.connection_kwargs["host"] for s in sentinels] == ["one", "two"]
    assert sentinels[0].connection_pool.connection_kwargs["password"] == "s@cret"
    assert transport_options(SENTINELS)["master_name"] == "main"


def test_socket_client_ignores_tcp_options() -> None:
    client = connect("unix:///run/redis.sock?db=4", socket_keepalive=True, socket_connect_timeout=1)
    assert issubclass(client.connection_pool.connection_class, UnixDomainSocketConnection)
    assert database_of(client) == 4


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "it must look like redis://HOST:PORT/DB"),
        ("me:secret@h", "it must look like"),
        ("http://me:secret@h", "it must look like"),
        ("redis://me:sec/ret@h/0", "the URL can't be parsed"),
        ("redis://:secret", "it must look like"),
        ("redis://me:secret@[::1/0", "Write /, @, :, \\? and # in a password"),
        ("redis://:secret@h:99999/0", "the URL can't be parsed"),
        ("redis://:secret@h/first", "the database must be a number"),
        ("redis://:secret@h/0?timeout=1", "unknown option 'timeout'"),
        ("rediss://:secret@h/0?ssl_cert_reqs=never", "it must be required, optional or none"),
        ("unix://run/redis.sock", "with three slashes"),
        ("sentinel://:secret@h", "add \\?master_name=NAME"),
        ("sentinel://:secret@h,g/0?master_name=m", "semicolons"),
    ],
)
def test_invalid_redis_url_is_explained_without_its_password(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_redis_url(url)
    assert "secret" not in str(caught.value) + mask_url(url)
    assert "ret@" not in mask_url(url)
