"""Options: precedence, and one clear sentence for everything that is wrong."""

import dataclasses

import pytest
from harness.options import load

from lmcache_server.commands.cli import cli
from lmcache_server.config import FLAGS, Config, checked, describe, flag_name, variable_name
from lmcache_server.errors import StartError
from lmcache_server.host.units import GB_BYTES


def write(tmp_path, text):
    path = tmp_path / "lmcache.toml"
    path.write_text(text)
    return str(path)


def of_file(tmp_path, text, **environment):
    return load("--config", write(tmp_path, text), environment=environment)


def sentence(*arguments, **environment):
    with pytest.raises(StartError) as caught:
        load(*arguments, environment=environment)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    return str(caught.value)


def test_flag_before_environment_before_file_before_default(tmp_path):
    path = write(tmp_path, "port = 1\nhttp_port = 2\nlease_s = 3\nl1_hugetlb = true")
    environment = {"LMCACHE_PORT": "11", "LMCACHE_HTTP_PORT": "12"}
    config = load("--port", "21", "--config", path, environment=environment)
    assert (config.port, config.http_port, config.lease_s, config.log_level) == (21, 12, 3.0, "info")
    # What is off goes before all else, too.
    assert config.l1_hugetlb
    assert not load("--config", path, environment={"LMCACHE_L1_HUGETLB": "no"}).l1_hugetlb
    assert not load("--config", path, "--no-l1-hugetlb", environment={"LMCACHE_L1_HUGETLB": "on"}).l1_hugetlb
    # The environment can name the file, and the flag goes before it.
    assert load(environment={"LMCACHE_CONFIG": path}).port == 1
    assert "cannot read" in sentence("--config", str(tmp_path / "other.toml"), LMCACHE_CONFIG=path)


def test_every_option_can_be_set_in_each_way(tmp_path):
    values = {
        "host": "127.0.0.1", "port": 1, "allow_remote": True, "key_file": "/run/key",
        "http_host": "::1", "http_port": 0, "chunk_size": 544, "l1_size_gb": 0.5,
        "eviction_policy": "lru", "l1_hugetlb": False,
        "checksums": True,
        "gpu_kernel": True, "lease_s": 7.5, "log_level": "DEBUG", "log_format": "json",
    }  # fmt: skip
    assert [*values, "of_options"] == [field.name for field in dataclasses.fields(Config)]
    # Those that are no text are set in the tests of their own part.
    others = {name: FLAGS[name].default for name in FLAGS if name not in values}
    files = [name for name in others if FLAGS[name].metadata["metavar"] == "FILE"]
    values |= {name: f"/tmp/{name}" for name in files}
    expected = checked(others | values | {"eviction_policy": "LRU", "log_level": "debug"})
    texts = {name: str(value) for name, value in values.items()}
    booleans = {name: value for name, value in values.items() if isinstance(value, bool)}
    flags = [flag_name(name if value else f"no_{name}") for name, value in booleans.items()]
    flags += [f"{flag_name(name)}={texts[name]}" for name in values if name not in booleans]
    written = {name: repr(value) for name, value in values.items()}
    written |= {name: str(value).lower() for name, value in booleans.items()}
    assert load(*flags) == expected
    assert load(environment={variable_name(name): text for name, text in texts.items()}) == expected
    assert of_file(tmp_path, "\n".join(f"{name} = {text}" for name, text in written.items())) == expected
    for text in ("auto", " AUTO "):
        assert load("--chunk-size", text).chunk_size is None
        assert of_file(tmp_path, f'chunk_size = "{text}"').chunk_size is None
    texts = {name: f'"{text}"' for name, text in texts.items()}
    assert of_file(tmp_path, "\n".join(f"{name} = {text}" for name, text in texts.items())) == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("port", "0", "--port must be an integer from 1 to 65535, not '0'"),
        ("http_port", "65536", "--http-port must be an integer from 0 to 65535, not '65536'"),
        ("chunk_size", "0", "--chunk-size must be auto, or an integer from 1 to 4194304, not '0'"),
        ("chunk_size", "2.5", "--chunk-size must be auto, or an integer from 1 to 4194304, not '2.5'"),
        ("l1_size_gb", "0", "--l1-size-gb must be a number from 0.001 to 100000, not '0'"),
        ("l1_size_gb", "nan", "--l1-size-gb must be a number from 0.001 to 100000, not 'nan'"),
        ("lease_s", "0.5", "--lease-s must be a number from 1 to 86400, not '0.5'"),
        ("eviction_policy", "FIFO", "--eviction-policy must be LRU, not 'FIFO'"),
        ("log_level", "loud", "--log-level must be one of debug, info, warning, error, not 'loud'"),
        ("host", "\udcff", "--host must be text that can be printed, not '\\udcff'"),
        ("key_file", "a\nb", "--key-file must be text that can be printed, not 'a\\nb'"),
        ("port", "9" * 5000, "--port must be an integer from 1 to 65535, not '999999999999...9999999999999'"),
    ],
)
def test_a_bad_flag_says_what_would_be_good(name, value, expected):
    assert sentence(flag_name(name), value) == expected


def test_a_bad_variable_is_named():
    assert sentence(LMCACHE_L1_HUGETLB="maybe") == (
        "the environment variable LMCACHE_L1_HUGETLB must be true or false, not 'maybe'"
    )
    assert sentence(LMCACHE_HTTP_HOST="\udcff").startswith("the environment variable LMCACHE_HTTP_HOST must")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port = true", "port in {path} must be an integer from 1 to 65535, not True"),
        ("port = 5.0", "port in {path} must be an integer from 1 to 65535, not 5.0"),
        ("port" + ".a" * 5000 + " = 1", "port in {path} must be an integer from 1 to 65535, not {{'a': {{"),
        ("port = 0x" + "f" * 5000, "port in {path} must be an integer from 1 to 65535, not a number"),
        ("lease_s = true", "lease_s in {path} must be a number from 1 to 86400, not True"),
        ("lease_s = nan", "lease_s in {path} must be a number from 1 to 86400, not nan"),
        ("lease_s = 1" + "0" * 400, "lease_s in {path} must be a number from 1 to 86400, not 1000"),
        ("host = 7", "host in {path} must be text that can be printed, not 7"),
        ('host = "\\u0000"', "host in {path} must be text that can be printed, not '\\x00'"),
        ("log_level = 1979-05-27", "log_level in {path} must be one of debug, info, warning, error, not "),
        ("checksums = 'maybe'", "checksums in {path} must be true or false, not 'maybe'"),
        ("chunk-size = 3", "unknown key 'chunk-size' in {path}: did you mean chunk_size?"),
        ("[l1]\nsize = 3", "unknown key 'l1' in {path}: the names are host, port, "),
        ("x" * 5000 + " = 3", "unknown key 'xxxxx"),
        ("port", "the configuration file {path} is not valid TOML: "),
        ("port = " + "[" * 5000, "the configuration file {path} is not valid TOML: maximum recursion"),
    ],
    ids=lambda value: value[:20],
)
def test_a_bad_file_says_where_and_what(tmp_path, text, expected):
    path = write(tmp_path, text)
    assert sentence("--config", path).startswith(expected.format(path=path))


def test_files_that_cannot_be_read(tmp_path):
    missing = str(tmp_path / "missing.toml")
    assert sentence("--config", missing) == (
        f"cannot read the configuration file {missing}: No such file or directory"
    )
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert "is not valid TOML" in sentence("--config", str(binary))
    large = tmp_path / "large.toml"
    large.write_text("#" * (1 << 20) + "\n")
    assert sentence("--config", str(large)).endswith("has more than 1048576 bytes")
    assert sentence("--config", "/dev/zero").endswith("/dev/zero has more than 1048576 bytes")


def test_variables_of_others_are_not_ours():
    # LMCache has more of them, and Kubernetes sets LMCACHE_PORT in the pods of a Service named lmcache.
    environment = {
        "LMCACHE_USE_EXPERIMENTAL": "True",
        "LMCACHE_PORT": "tcp://10.0.0.7:5555",
        "LMCACHE_HOST": "",
    }
    assert load(environment=environment) == Config()


@pytest.mark.parametrize("name", ["host", "http_host"])
def test_other_machines_are_let_in_only_by_an_explicit_flag(name):
    flag = "--" + name.replace("_", "-")
    key = "--key-file for a key, or " if name == "host" else ""
    for host in ("0.0.0.0", "::", "[::]", "10.1.2.3", "tcp://0.0.0.0", "example.org"):
        assert sentence(flag, host) == (
            f"{flag} {host} lets other machines connect, without password or encryption: "
            f"add {key}--allow-remote if you want that, or use 127.0.0.1"
        )
        assert getattr(load(flag, host, "--allow-remote"), name) == host
    for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.0.0.9"):
        assert getattr(load(flag, host), name) == host
    # A key lets in only who has it, and HTTP has none.
    assert load("--host", "0.0.0.0", "--key-file", "/run/key").host == "0.0.0.0"
    assert "--http-host 0.0.0.0" in sentence("--http-host", "0.0.0.0", "--key-file", "/run/key")


def test_what_cannot_be_is_one_sentence():
    # ZeroMQ and the system would take no name at all for all addresses.
    for name, hosts in {"--http-host": ("", "/", "[]", "tcp://"), "--host": ("/", "[]", "tcp:///")}.items():
        for host in hosts:
            for more in ([], ["--allow-remote"]):
                said = sentence(name, host, *more)
                assert said == f"{name} must name an address, for example 127.0.0.1", host


def test_commands_read_only_what_they_need(monkeypatch, tmp_path):
    monkeypatch.setenv("LMCACHE_L1_SIZE_GB", "rubbish")
    monkeypatch.setenv("LMCACHE_CONFIG", write(tmp_path, "port = 77\nlease_s = 'rubbish'"))
    context = cli.commands["ping"].make_context("ping", [])
    assert context.params == {"host": "", "port": 77, "key_file": "", "timeout_s": 10.0}


def test_the_defaults_and_one_line_with_every_option():
    config = load()
    assert config == Config()
    assert (config.port, config.http_port, config.chunk_size) == (5555, 8080, None)
    assert config.l1_size_bytes == 4 * GB_BYTES
    line = describe(load("--port", "7", "--chunk-size", "544", "--l1-hugetlb"))
    assert line == (
        "configuration: host='a Unix socket' port=7 allow_remote=no key_file=none http_host=127.0.0.1 "
        "http_port=8080 chunk_size=544 l1_size_gb=4 eviction_policy=LRU l1_hugetlb=yes "
        "checksums=no gpu_kernel=no lease_s=120 log_level=info log_format=text"
    ) + "".join(f" {name}=none" for name in list(FLAGS)[len(dataclasses.fields(Config)) - 1 :])
    line = describe(load("--host", "0.0.0.0", "--allow-remote", "--l1-size-gb", "2.50"))
    assert "host=0.0.0.0 " in line
    assert "l1_size_gb=2.5 " in line
