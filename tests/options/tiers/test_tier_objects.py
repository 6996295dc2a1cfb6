"""The tier in object stores: SeaweedFS for S3, Azurite for Azure. Google's cannot be tested here."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from harness import stores, tools
from harness.stores import ACCOUNT, Store
from harness.tiers import TierContract, all_fail_in_time, fails, fails_meanwhile, kept, memory, working
from harness.waiting import wait_until

from lmcache_server.options.tiers.base import Tier

DEADLINE_S = 4.5
"""Two attempts, and a little between them."""
Open = Callable[..., Tier]


@pytest.fixture(autouse=True)
def secrets(monkeypatch) -> None:
    for name, value in stores.SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def s3(tmp_path_factory) -> Iterator[Store]:
    with stores.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as store:
        yield store


@pytest.fixture(scope="module")
def azure(tmp_path_factory) -> Iterator[Store]:
    with stores.azurite(tmp_path_factory.mktemp("azurite")) as store:
        yield store


@pytest.fixture
def open_at() -> Iterator[Open]:
    tools.module("obstore", "s3")
    from lmcache_server.options.tiers.object_store import Objects

    opened = []

    def open_it(store: Store, scheme: str = "s3", prefix: str = "some/where", **more) -> Tier:
        account = f"/{ACCOUNT}" if scheme == "az" else ""
        endpoint = f"http://127.0.0.1:{store.port}{account}"
        opened.append(
            Objects(scheme, "records", prefix, **{"endpoint": endpoint, "allow_http": True, **more})
        )
        return opened[-1]

    yield open_it
    for tier in opened:
        tier.close()


@pytest.fixture(params=["s3", "az"])
def tier(request, open_at: Open) -> Tier:
    if request.param == "s3":
        store = request.getfixturevalue("s3")
    else:
        store = request.getfixturevalue("azure")
        stores.create_container(store, "records")
    tier = open_at(store, request.param)
    wait_until(lambda: working(lambda: tier.write("0", memory(1))), 60, "the store takes objects")
    tier.clear("")
    return tier


class TestContract(TierContract):
    pass


def test_presence_of_a_chain_takes_a_few_requests(open_at, s3, monkeypatch):
    names = [f"{number:x}" for number in range(512)]
    for there in (0, 1, 2, 7, 8, 9, 63, 64, 200, 511, 512):
        tier, asked = open_at(s3), []
        is_there = lambda _, name, there=there, to=asked: to.append(name) or int(name, 16) < there  # noqa: E731
        monkeypatch.setattr(type(tier), "_is_there", is_there)
        assert list(tier.present(names)) == [True] * there + [False] * (512 - there)
        assert len(asked) <= (1 if there == 0 else 28), there


def test_what_is_absent_is_not_asked_for_again_for_a_while(open_at, s3, monkeypatch):
    from lmcache_server.options.tiers import object_store

    tier = open_at(s3)
    tier.clear("")
    assert tier.write("0", memory(1))
    assert list(tier.present(["0", "1", "2"])) == [True, False, False]
    other = open_at(s3)
    assert other.write("1", memory(1))
    assert list(tier.present(["0", "1", "2"])) == [True, False, False], "it is remembered"
    assert list(other.present(["0", "1", "2"])) == [True, True, False]
    assert tier.write("1", memory(1)), "and forgotten with the write"
    assert list(tier.present(["0", "1", "2"])) == [True, True, False]
    monkeypatch.setattr(object_store, "ABSENT_S", 0.0)
    monkeypatch.setattr(object_store, "MAX_ABSENT", 3)
    for number in range(10):
        assert not tier.read(f"a{number}", memory(1))
    assert len(tier._absent) <= 3
    assert other.write("a9", memory(1))
    assert list(tier.present(["a9"])) == [True], "its time is over"


def test_an_object_of_another_size_is_replaced_and_never_deleted(open_at, s3):
    """Somebody else may have answered, such as the page of a hotel's network."""
    tier = open_at(s3)
    assert tier.write("a", memory(2, seed=2))
    assert not tier.read("a", memory(1))
    assert list(tier.present(["a"])) == [False], "so it is neither deleted nor kept from being written"
    assert kept(open_at(s3), "a", memory(2, seed=2))
    assert tier.write("a", memory(1, seed=1))
    assert kept(tier, "a", memory(1, seed=1))


def test_a_prefix_keeps_tiers_apart(open_at, s3):
    one, other, whole = (open_at(s3, prefix=prefix) for prefix in ("one", "one/other", ""))
    whole.clear("")
    for number, tier in enumerate((one, other, whole)):
        assert tier.write("a", memory(1, seed=number))
    assert all(kept(tier, "a", memory(1, seed=n)) for n, tier in enumerate((one, other, whole)))
    other.clear("")
    assert kept(one, "a", memory(1, seed=0))
    assert not other.read("a", memory(1))


@pytest.mark.parametrize(
    ("how", "sentence"), [("hangs", "gave no answer in time"), ("killed", "cannot be reached")]
)
def test_a_store_that_hangs_or_dies_fails_each_call_at_its_deadline(open_at, s3, how, sentence):
    tier = open_at(s3)
    fails_meanwhile(tier, s3, how, sentence, DEADLINE_S)
    # The requests in vain may have been done after all.
    assert working(lambda: tier.read("a", memory(2))) is not None


def test_wrong_credentials_name_the_variables(open_at, s3, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    tier = open_at(s3)
    for call in (lambda: tier.read("a", memory(1)), lambda: tier.write("a", memory(1))):
        text = fails(call)
        assert "AWS_ACCESS_KEY_ID" in text
        assert "wrong-secret" not in text


def test_a_missing_container_is_one_clear_error(open_at, azure):
    tier = open_at(azure, "az")
    tier._store = type(tier._store)(
        "missing", endpoint=f"http://127.0.0.1:{azure.port}/{ACCOUNT}", client_options={"allow_http": True}
    )
    assert "create it" in fails(lambda: tier.write("a", memory(1)))
    assert not tier.read("a", memory(1))


def test_plain_http_is_not_spoken_unasked(open_at, s3):
    """Nor is a redirect followed, which only TLS would refuse otherwise."""
    settings = {"endpoint": f"https://127.0.0.1:{s3.port}"}, {"allow_http": False}
    tiers = [open_at(s3, **each) for each in settings]
    calls = [partial(call, "a", memory(1)) for tier in tiers for call in (tier.write, tier.read)]
    assert all_fail_in_time(calls, DEADLINE_S)


def test_a_clear_leaves_what_others_keep_in_the_bucket(open_at, s3):
    import obstore

    for prefix in ("", "some/where"):
        tier = open_at(s3, prefix=prefix)
        others = ("notes.txt", "ab/cd", "some/where/ab", "some/other/ab")
        for path in others:
            obstore.put(tier._store, path, b"mine")
        assert tier.write("ab/cd", memory(1))
        tier.clear("")
        assert not any(tier.present(["ab/cd"]))
        for path in others:
            assert obstore.get(tier._store, path).bytes() == b"mine"
