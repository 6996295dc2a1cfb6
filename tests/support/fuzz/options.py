"""The options of the server from a TOML file and the environment: a valid Config, or one sentence."""

import tempfile
from pathlib import Path
from typing import Any

import click
from harness.options import load

from fuzz.choices import Choices, Target
from lmcache_server.config import FLAGS, Config, describe, values, variable_name
from lmcache_server.errors import StartError

MAX_SENTENCE = 1000


def _line(name: str, option: Any) -> bytes:
    """The default of the option, as TOML has it."""
    default = option.default
    if isinstance(default, str | None):
        return f'{name} = "{default or "auto"}"'.encode()
    return f"{name} = {default}".lower().encode()


class OptionsTarget(Target):
    """The input is a TOML file, and behind a zero byte pairs of a variable and its text."""

    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory(prefix="lmcache-fuzz-")
        self._path = Path(self._directory.name, "lmcache.toml")
        lines = [_line(name, option) for name, option in FLAGS.items() if name != "host"]
        odd = b'port = 1_0\nlease_s = 1e3\nl1_size_gb = inf\nhttp_host = """\\u0031"""\n[a.b]\nc = [{d = 1}]'
        variables = b"\0" + bytes([1, 4]) + b"5555" + bytes([4, 4]) + b"auto" + bytes([12, 4]) + b"json"
        bell = b'http_host = "1\\u0007"'
        self.seeds = [*lines, b"\n".join(lines) + variables, variables, odd, bell]

    def close(self) -> None:
        self._directory.cleanup()

    def run(self, data: bytes) -> None:
        self.inputs += 1
        toml, _, rest = data.partition(b"\0")
        self._path.write_bytes(toml)
        environment, choices = {}, Choices(rest)
        while choices.left:
            name = variable_name(tuple(FLAGS)[choices.below(len(FLAGS))])
            text = choices.take(choices.below(40)).replace(b"\0", b"")
            environment[name] = text.decode(errors="surrogateescape")
        try:
            config = load("--config", str(self._path), environment=environment)
        except StartError as error:
            sentence = str(error)
            assert sentence.isprintable() or not toml.decode(errors="replace").isprintable(), sentence
            assert "\n" not in sentence, sentence
            assert 0 < len(sentence) < MAX_SENTENCE, sentence
            self.outcomes["refused"] += 1
            return
        self._check(config)
        self.outcomes["taken"] += 1

    def _check(self, config: Config) -> None:
        for name, value in values(config).items():
            option, kind = FLAGS[name], FLAGS[name].metadata["type"]
            assert type(value) in (type(option.default), *((int,) if name == "chunk_size" else ())), name
            if isinstance(kind, click.IntRange | click.FloatRange):
                assert kind.min <= value <= kind.max, (name, value)
            if isinstance(value, str):
                assert value.isprintable(), (name, value)
        line = describe(config)
        assert "\n" not in line, line
        line.encode()
