"""The tier in Valkey, on real servers: one, and a cluster of three."""

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from harness import stores, tools
from harness.processes import free_port
from harness.proxy import Proxy
from harness.stores import Store, ask
from harness.tiers import (
    TierContract,
    all_fail_in_time,
    all_kept,
    fails,
    fails_meanwhile,
    fill,
    kept,
    memory,
    working,
)
from harness.waiting import wait_until

from lmcache_server.options.tiers.base import Tier, TierError

DEADLINE_S = 1.0
Open = Callable[..., Tier]


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Iterator[Store]:
    with stores.valkey(tmp_path_factory.mktemp("valkey")) as store:
        yield store


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[list[Store]]:
    with stores.valkey_cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture
def open_at() -> Iterator[Open]:
    tools.module("glide_sync", "valkey")
    from lmcache_server.options.tiers.valkey import Valkey

    opened = []

    def open_it(*ports: int, **more) -> Tier:
        opened.append(Valkey([("127.0.0.1", port) for port in ports], **more))
        return opened[-1]

    yield open_it
    for tier in opened:
        tier.close()


@pytest.fixture(params=["one", "cluster"])
def tier(request, open_at: Open) -> Tier:
    if request.param == "one":
        tier = open_at(request.getfixturevalue("one").port)
    else:
        tier = open_at(request.getfixturevalue("cluster")[0].port, cluster=True)
    tier.clear("")
    return tier


class TestContract(TierContract):
    pass


def fails_in_time(call: Callable[[], object], requests: int = 1) -> str:
    return all_fail_in_time([call], requests * DEADLINE_S)[0]


def test_a_cluster_shares_the_records_out(open_at, cluster):
    tier = open_at(*(node.port for node in cluster[1:]), cluster=True)
    tier.clear("")
    names = [f"{number}/a" for number in range(60)]
    fill(tier, names)
    assert all(tier.present(names))
    sizes = [int(ask(node.port, "DBSIZE").strip(":\r\n")) for node in cluster]
    assert min(sizes) > 5
    assert sum(sizes) == 60
    tier.clear("1")
    assert sum(tier.present(names)) == 60 - 11


def test_keys_of_others_are_left_alone(open_at, one):
    assert "OK" in ask(one.port, "SET theirs 1")
    assert "OK" in ask(one.port, "SET lmc2:a 1")
    tier = open_at(one.port)
    assert tier.write("a", memory(1))
    tier.clear("")
    assert ask(one.port, "EXISTS theirs lmc2:a lmc1:a") == ":2\r\n"


def test_a_read_asks_for_the_size_only_if_nobody_has_just_done_so(open_at, tmp_path):
    """The question would wait behind the values that others read."""
    with stores.valkey(tmp_path) as store:
        tier = open_at(store.port)
        fill(tier, ["a", "b"])
        assert "OK" in ask(store.port, "CONFIG RESETSTAT")

        def calls(name: str) -> list[str]:
            return re.findall(rf"cmdstat_{name}:calls=(\d+)", ask(store.port, "INFO commandstats"))

        assert list(tier.present(["a", "c"])) == [True, False]
        assert all_kept(tier, ["a", "b"])
        assert (calls("strlen"), calls("get")) == (["3"], ["2"])
        assert tier.write("a", memory(8))
        for _ in range(2):
            assert tier.read("a", memory(4)) == 0, "a longer value is left where it is"
            assert tier.present(["a"])[0]
        assert calls("get") == ["2"]
        assert tier.write("a", memory(4, seed=5)), "another server has written it again"
        assert kept(tier, "a", memory(4, seed=5))
        assert tier.write("b", memory(2, seed=3))
        assert kept(tier, "b", memory(2, seed=3))


def test_bytes_that_change_after_a_call_in_vain_never_arrive(open_at, tmp_path):
    """Whoever wrote may use the memory again after the call, even if the server was only slow."""
    with stores.valkey(tmp_path) as store:
        tier = open_at(store.port)
        written = memory(1024, seed=1)
        with store.failing("hangs"):
            fails_in_time(lambda: tier.write("a", written))
            written[0][:] = bytes(written[0].nbytes)
        time.sleep(0.5)
        into = memory(1024)
        wait_until(lambda: working(lambda: tier.present(["a"])) is not None)
        if tier.read("a", into):
            assert bytes(into[0]) == bytes(memory(1024, seed=1)[0])

        into = memory(1024)
        with store.failing("hangs"):
            fails_in_time(lambda: tier.read("a", into))
            into[0][:] = bytes([7]) * into[0].nbytes
        wait_until(lambda: working(lambda: tier.present(["a"])) is not None)
        time.sleep(0.5)
        assert set(into[0]) == {7}, "nothing is written into memory after the call"


def test_opening_a_store_that_is_not_there_leaves_nothing_in_memory(open_at, monkeypatch):
    """glide's clients register themselves for forks, and that cannot be taken back."""
    registered: list[object] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: registered.append(hooks))
    for _ in range(3):
        with pytest.raises(TierError, match="nothing accepts connections there"):
            open_at(free_port())
    assert not registered


@pytest.mark.parametrize("how", ["hangs", "killed"])
def test_a_store_that_hangs_or_dies_fails_each_call_at_its_deadline(open_at, tmp_path, how):
    with stores.valkey(tmp_path) as store:
        fails_meanwhile(open_at(store.port), store, how, "gave no answer in time", DEADLINE_S)
        with store.failing(how):
            assert "Valkey at 127.0.0.1" in fails_in_time(lambda: open_at(store.port), 3)


def test_a_connection_that_went_silent_is_replaced(open_at, one):
    """As after a firewall has forgotten it: the store is well, and takes new connections."""
    with Proxy(one.port) as proxy:
        tier = open_at(proxy.port)
        assert tier.write("a", memory(2, seed=1))
        for _ in range(2):
            proxy.silence()
            assert [working(lambda: list(tier.present(["a"]))) for _ in range(4)] == [None] * 3 + [[True]]
        proxy.silence()
        texts = all_fail_in_time([lambda: tier.read("a", memory(2))] * 12, 3 * DEADLINE_S)
        assert all("gave no answer in time" in text for text in texts), "in several threads at once"
        assert kept(tier, "a", memory(2, seed=1))


def test_a_value_longer_than_its_record_stays_in_the_store(open_at, one):
    tier = open_at(one.port)
    assert tier.write("a", memory(4096))
    sent = int(re.findall(r"total_net_output_bytes:(\d+)", ask(one.port, "INFO stats"))[0])
    assert not tier.read("a", memory(1))
    assert int(re.findall(r"total_net_output_bytes:(\d+)", ask(one.port, "INFO stats"))[0]) - sent < 1 << 20


def test_a_replica_that_becomes_the_primary_is_found_with_its_records(open_at, tmp_path):
    with stores.valkey(tmp_path) as first, stores.valkey(tmp_path) as second:
        stores.follow(second, first)
        tier, pages = open_at(first.port, second.port), memory(2, seed=1)
        assert tier.write("a", pages)
        wait_until(lambda: ":1" in ask(second.port, "EXISTS lmc1:a"))
        first.kill()
        assert "OK" in ask(second.port, "REPLICAOF NO ONE")
        assert [working(lambda: kept(tier, "a", pages)) for _ in range(4)][-1], "it died"
        assert tier.write("b", pages)
        first.restart()
        stores.follow(first, second)
        assert "OK" in ask(first.port, "REPLICAOF NO ONE")
        stores.follow(second, first)
        assert "is a replica, which takes no records" in fails(lambda: tier.write("c", pages))
        assert all(tier.present(["a", "b"])), "it is asked as before"
        assert tier.write("c", pages), "they changed places"
        assert ask(first.port, "EXISTS lmc1:a lmc1:b lmc1:c") == ":3\r\n"


def test_a_replica_without_its_primary_is_refused(open_at, one, tmp_path):
    with stores.valkey(tmp_path) as replica:
        stores.follow(replica, one)
        assert "add the address of its primary" in fails(lambda: open_at(replica.port))


def test_a_cluster_fails_over_and_moves_its_slots_without_losing_a_record(open_at, tmp_path):
    """A replica takes the place of a node that died; then a third of all keys goes to another node."""
    with stores.valkey_cluster(tmp_path) as nodes, stores.valkey_node(tmp_path, 3) as replica:
        stores.meet(nodes[0], replica)
        node_id = ask(nodes[0].port, "CLUSTER MYID").split()[1]
        wait_until(lambda: "OK" in ask(replica.port, f"CLUSTER REPLICATE {node_id}"))
        wait_until(lambda: "master_link_status:up" in ask(replica.port, "INFO replication"))
        tier = open_at(*(node.port for node in nodes), cluster=True)
        names = [f"{number}" for number in range(60)]
        fill(tier, names)
        held = ask(nodes[0].port, "DBSIZE")
        wait_until(lambda: ask(replica.port, "DBSIZE") == held, what="the replica has all records")
        nodes[0].kill()
        wait_until(lambda: "role:master" in ask(replica.port, "INFO replication"), what="a new primary")
        wait_until(lambda: working(lambda: all(tier.present(names))))
        assert all(kept(tier, name, memory(1, seed=number)) for number, name in enumerate(names))
        stores.move_slots(nodes[1], nodes[2])
        assert ask(nodes[1].port, "DBSIZE") == ":0\r\n"
        assert all(kept(tier, name, memory(1, seed=number)) for number, name in enumerate(names))
        assert tier.write("a", memory(1))


def test_a_lost_node_takes_only_its_own_records(open_at, tmp_path):
    with stores.valkey_cluster(tmp_path) as nodes:
        tier = open_at(*(node.port for node in nodes), cluster=True)
        names = [f"{number}" for number in range(60)]
        fill(tier, names)
        nodes[2].kill()
        answers = []
        for number, name in enumerate(names[:24]):
            answers.append(working(partial(kept, tier, name, memory(1, seed=number))))
        assert answers.count(True) > 8
        assert None in answers
        assert answers.count(False) == 0


def test_a_wrong_password_names_the_variables(open_at, tmp_path):
    with stores.valkey(tmp_path, requirepass="right") as store:
        assert "LMCACHE_VALKEY_PASSWORD" in fails(lambda: open_at(store.port))
        text = fails(lambda: open_at(store.port, password="wr0ng"))
        assert "LMCACHE_VALKEY_PASSWORD" in text
        assert "wr0ng" not in text
        assert open_at(store.port, password="right").write("a", memory(1))


def test_a_user_of_an_acl_may_be_named(open_at, tmp_path):
    with stores.valkey(tmp_path) as store:
        rights = "~lmc1:* +info +strlen +get +set +unlink +scan"
        assert "OK" in ask(store.port, f"ACL SETUSER cache on >secret {rights}")
        tier = open_at(store.port, username="cache", password="secret")
        assert tier.write("a", memory(2, seed=1))
        assert kept(tier, "a", memory(2, seed=1))
        tier.clear("a")
        assert list(tier.present(["a"])) == [False]
        assert "OK" in ask(store.port, "ACL SETUSER reader on >secret ~lmc1:* +info +get")
        reader = open_at(store.port, username="reader", password="secret")
        assert "forbids this user" in fails(lambda: reader.write("a", memory(1)))


def test_a_store_that_cannot_evict_is_one_warning(open_at, tmp_path, caplog):
    with stores.valkey(tmp_path) as store, caplog.at_level(logging.WARNING):
        for name, value, sentence in (
            ("maxmemory-policy", "noeviction", "never evicts records (noeviction): set maxmemory-policy"),
            ("maxmemory-policy", "volatile-lru", "never evicts records (volatile-lru)"),
            ("maxmemory-policy", "allkeys-lfu", ""),
            ("maxmemory", "0", "grows without limit: set maxmemory"),
        ):
            assert "OK" in ask(store.port, f"CONFIG SET {name} {value}")
            caplog.clear()
            open_at(store.port)
            assert len(caplog.records) == bool(sentence), value
            assert sentence in caplog.text


def test_a_store_that_is_full_has_no_room_or_evicts(open_at, tmp_path):
    with stores.valkey(tmp_path, maxmemory="4mb", **{"maxmemory-policy": "noeviction"}) as store:
        tier = open_at(store.port)
        results = [tier.write(f"{number}", memory(256, seed=number)) for number in range(6)]
        assert results[0]
        assert not results[-1]
        assert kept(tier, "0", memory(256, seed=0))
        refused = refusals(store)
        assert not any(tier.write(f"a{number}", memory(256)) for number in range(50))
        assert refusals(store) - refused <= 1, (
            "it is not asked again and again, because glide prints each one"
        )
        tier.remove(["0", "1", "2"])
        assert tier.write("a", memory(256))

        assert "OK" in ask(store.port, "CONFIG SET maxmemory-policy allkeys-lru")
        assert "OK" in ask(store.port, "CONFIG SET maxmemory 8mb")
        names = [f"b{number:x}" for number in range(32)]
        fill(tier, names, 256)
        assert 1 <= sum(tier.present(names)) < 8
        assert kept(tier, names[-1], memory(256, seed=31))


def refusals(store: Store) -> int:
    found = re.search(r"errorstat_OOM:count=(\d+)", ask(store.port, "INFO errorstats"))
    return int(found[1]) if found else 0


def test_a_cluster_and_a_single_server_are_not_taken_for_each_other(open_at, one, cluster):
    assert "add cluster=1" in fails(lambda: open_at(cluster[0].port))
    assert fails(lambda: open_at(one.port, cluster=True))


def test_a_key_that_holds_no_record_is_one_clear_error(open_at, one):
    tier = open_at(one.port)
    assert ":1" in ask(one.port, "LPUSH lmc1:15 x")
    assert "WRONGTYPE" in fails(lambda: tier.read("15", memory(1)))
    tier.remove(["15"])
    assert not tier.read("15", memory(1))


def test_a_port_that_speaks_something_else_fails_in_time(open_at, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def talk() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as connection:
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=talk, daemon=True).start()
        assert "Valkey at 127.0.0.1" in fails_in_time(lambda: open_at(port), 3)
        listener.shutdown(socket.SHUT_RDWR)
