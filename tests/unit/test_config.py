"""Options: precedence, and one clear sentence for everything that is wrong."""

import dataclasses

import pytest

from lmcache_server.config import (
    GB_BYTES,
    OPTIONS,
    Config,
    StartError,
    describe,
    load,
    resolve,
    variable_name,
)


def write(tmp_path, text):
    path = tmp_path / "lmcache.toml"
    path.write_text(text)
    return str(path)


def sentence(*arguments):
    with pytest.raises(StartError) as caught:
        load(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_defaults_suit_themselves():
    config = load({}, {}, None)
    assert config == Config()
    assert (config.port, config.http_port, config.chunk_size) == (5555, 8080, None)
    assert config.l1_size_bytes == 4 * GB_BYTES


def test_flag_before_environment_before_file_before_default(tmp_path):
    path = write(tmp_path, "port = 1\nhttp_port = 2\nlease_s = 3\n")
    environment = {"LMCACHE_PORT": "11", "LMCACHE_HTTP_PORT": "12"}
    config = load({"port": "21", "http_port": None}, environment, path)
    assert (config.port, config.http_port, config.lease_s, config.log_level) == (21, 12, 3.0, "info")


def test_the_environment_can_name_the_file_and_the_flag_goes_before_it(tmp_path):
    path = write(tmp_path, "port = 1234")
    assert load({}, {"LMCACHE_CONFIG": path}, None).port == 1234
    assert "cannot read" in sentence({}, {"LMCACHE_CONFIG": path}, str(tmp_path / "other.toml"))


def test_every_option_can_be_set_in_each_way(tmp_path):
    values = {
        "host": "127.0.0.1", "port": 1, "allow_remote": True, "http_host": "::1", "http_port": 0,
        "chunk_size": 544, "l1_size_gb": 0.5, "eviction_policy": "lru", "l1_hugetlb": False,
        "l1_path": "/dev/shm/l1", "verify": True, "lease_s": 7.5, "log_level": "DEBUG", "log_format": "json",
    }  # fmt: skip
    assert list(values) == list(OPTIONS) == [field.name for field in dataclasses.fields(Config)]
    expected = Config(**(values | {"eviction_policy": "LRU", "log_level": "debug"}))
    texts = {name: str(value) for name, value in values.items()}
    lines = [
        f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
        for name, value in values.items()
    ]
    assert load(texts, {}, None) == expected
    assert load({}, {variable_name(name): text for name, text in texts.items()}, None) == expected
    assert load({}, {}, write(tmp_path, "\n".join(lines))) == expected


@pytest.mark.parametrize("text", ["auto", "AUTO", " auto "])
def test_chunk_size_auto(text, tmp_path):
    assert load({"chunk_size": text}, {}, None).chunk_size is None
    assert load({}, {}, write(tmp_path, f'chunk_size = "{text}"')).chunk_size is None


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("port", "abc", "--port must be an integer from 1 to 65535, not 'abc'"),
        ("port", "0", "--port must be an integer from 1 to 65535, not '0'"),
        ("http_port", "65536", "--http-port must be an integer from 0 to 65535, not '65536'"),
        ("chunk_size", "0", "--chunk-size must be auto, or an integer from 1 to 4194304, not '0'"),
        ("chunk_size", "2.5", "--chunk-size must be auto, or an integer from 1 to 4194304, not '2.5'"),
        ("l1_size_gb", "0", "--l1-size-gb must be a number from 0.001 to 100000, not '0'"),
        ("l1_size_gb", "nan", "--l1-size-gb must be a number from 0.001 to 100000, not 'nan'"),
        ("l1_size_gb", "inf", "--l1-size-gb must be a number from 0.001 to 100000, not 'inf'"),
        ("lease_s", "0.5", "--lease-s must be a number from 1 to 86400, not '0.5'"),
        ("eviction_policy", "FIFO", "--eviction-policy must be LRU, not 'FIFO'"),
        ("log_level", "loud", "--log-level must be one of debug, info, warning, error, not 'loud'"),
    ],
)
def test_a_bad_flag_says_what_would_be_good(name, value, expected):
    assert sentence({name: value}, {}, None) == expected


def test_a_bad_variable_is_named():
    assert sentence({}, {"LMCACHE_L1_HUGETLB": "maybe"}, None) == (
        "the environment variable LMCACHE_L1_HUGETLB must be true or false, not 'maybe'"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port = 'x'", "port in {path} must be an integer from 1 to 65535, not 'x'"),
        ("port = true", "port in {path} must be an integer from 1 to 65535, not True"),
        ("port = 5.0", "port in {path} must be an integer from 1 to 65535, not 5.0"),
        ("lease_s = true", "lease_s in {path} must be a number from 1 to 86400, not True"),
        ("host = 7", "host in {path} must be text, not 7"),
        ("allow_remote = 1", "allow_remote in {path} must be true or false, not 1"),
        ("chunk-size = 3", "unknown key 'chunk-size' in {path}: did you mean chunk_size?"),
        ("[l1]\nsize = 3", "unknown key 'l1' in {path}: the keys are host, port, "),
        ("port", "the configuration file {path} is not valid TOML: "),
    ],
)
def test_a_bad_file_says_where_and_what(tmp_path, text, expected):
    path = write(tmp_path, text)
    assert sentence({}, {}, path).startswith(expected.format(path=path))


def test_files_that_cannot_be_read(tmp_path):
    missing = str(tmp_path / "missing.toml")
    assert sentence({}, {}, missing) == (
        f"cannot read the configuration file {missing}: No such file or directory"
    )
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert "is not valid TOML" in sentence({}, {}, str(binary))
    large = tmp_path / "large.toml"
    large.write_text("#" * (1 << 20) + "\n")
    assert sentence({}, {}, str(large)).endswith("has more than 1048576 bytes")


def test_variables_of_others_are_not_ours():
    # LMCache has more of them, and Kubernetes sets LMCACHE_PORT in the pods of a Service named lmcache.
    environment = {
        "LMCACHE_USE_EXPERIMENTAL": "True",
        "LMCACHE_PORT": "tcp://10.0.0.7:5555",
        "LMCACHE_HOST": "",
    }
    assert load({}, environment, None) == Config()


@pytest.mark.parametrize("name", ["host", "http_host"])
def test_other_machines_are_let_in_only_by_an_explicit_flag(name):
    flag = "--" + name.replace("_", "-")
    for host in ("0.0.0.0", "::", "[::]", "10.1.2.3", "tcp://0.0.0.0", "example.org"):
        assert sentence({name: host}, {}, None) == (
            f"{flag} {host} lets other machines connect, without password or encryption: "
            "add --allow-remote if that is wanted, or use 127.0.0.1"
        )
        assert getattr(load({name: host, "allow_remote": True}, {}, None), name) == host
    for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.0.0.9"):
        assert getattr(load({name: host}, {}, None), name) == host


def test_http_needs_an_address():
    assert sentence({"http_host": ""}, {}, None) == "--http-host must name an address, for example 127.0.0.1"


def test_a_file_has_no_huge_pages_of_its_own():
    assert sentence({"l1_path": "/dev/shm/l1", "l1_hugetlb": "yes"}, {}, None) == (
        "--l1-path and --l1-hugetlb exclude each other: leave one of them out"
    )


def test_commands_read_only_what_they_need():
    environment = {"LMCACHE_L1_SIZE_GB": "rubbish", "LMCACHE_PORT": "77"}
    assert resolve(("host", "port"), {}, environment) == {"host": "", "port": 77}


def test_the_configuration_is_one_line_with_every_option():
    line = describe(load({"port": "7", "chunk_size": "544", "l1_hugetlb": True}, {}, None))
    assert line == (
        "configuration: host='a Unix socket' port=7 allow_remote=no http_host=127.0.0.1 http_port=8080 "
        "chunk_size=544 l1_size_gb=4 eviction_policy=LRU l1_hugetlb=yes l1_path=none verify=no "
        "lease_s=120 log_level=info log_format=text"
    )
