"""The command `lmcache`. Each subcommand imports what it needs when it runs, so that --help is quick."""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from lmcache_client.contract.version import VERSION
from lmcache_server import config as configuration
from lmcache_server.config import OPTIONS, Command
from lmcache_server.errors import CommandError, StartError
from lmcache_server.host.logs import printable
from lmcache_server.host.units import GB_BYTES

EXIT_FAILED = 1
EXIT_USAGE = 2
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
CONTROL_TIMEOUT_S = 2.0

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _asking(*more: str) -> Callable[[Command], Command]:
    """The options of a command that asks a server, and these `more`."""

    def decorate(command: Command) -> Command:
        timeout = click.option(
            "--timeout-s",
            type=click.FloatRange(0.01, 3600),
            default=CONTROL_TIMEOUT_S,
            show_default=True,
            metavar="SECONDS",
            help="Seconds to wait for an answer.",
        )
        return configuration.options("host", "port", *more)(timeout(command))

    return decorate


_control_options = _asking()


@click.group(context_settings=_CONTEXT, invoke_without_command=True)
@click.version_option(VERSION, prog_name="lmcache")
@click.pass_context
def cli(context: click.Context) -> None:
    """A node-local KV cache server for vLLM."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(EXIT_USAGE)


@cli.command()
@configuration.options(*OPTIONS)
def server(**values: Any) -> int:
    """Run the server until SIGTERM, SIGINT or SIGHUP.

    Each option may also be set by the environment variable shown, or by a key of the TOML file. A flag
    overrides the environment, the environment overrides the file, the file overrides the default.
    """
    config = configuration.checked(values)
    from lmcache_server.app import run

    return run(config)


@cli.command()
@_control_options
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def status(host: str, port: int, timeout_s: float, as_json: bool) -> None:
    """Print what a server holds: memory, namespaces, sessions, hit rate."""
    import json

    from lmcache_server.commands import control
    from lmcache_server.commands.status import summary

    report = control.report(host, port, timeout_s)
    click.echo(json.dumps(report, indent=2) if as_json else summary(report))


@cli.command()
@_asking("l1_size_gb")
@click.option(
    "--from",
    "record",
    metavar="FILE",
    help="Read a file that `lmcache server --record` wrote, instead of asking a server.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def plan(
    host: str, port: int, timeout_s: float, l1_size_gb: float, record: str | None, as_json: bool
) -> None:
    """Print the hit rates that other sizes of L1 would have had.

    The server counts every lookup. So these rates are no estimates for models with full attention alone. For
    other models they are estimates. --l1-size-gb is only needed with --from.
    """
    import json

    from lmcache_server.commands import control
    from lmcache_server.commands.plan import replayed, table

    if record is not None:
        l1_bytes = int(l1_size_gb * GB_BYTES)
        demand = replayed(record, l1_bytes)
    else:
        report = control.report(host, port, timeout_s)
        demand, l1_bytes = report["demand"], report["l1"]["total_bytes"]
    click.echo(json.dumps(demand, indent=2) if as_json else table(demand, l1_bytes))


@cli.command()
@_control_options
def clear(host: str, port: int, timeout_s: float) -> None:
    """Make a server forget all chunks of all models.

    If a request is loading a chunk or about to load it, the chunk's memory becomes free afterwards.
    """
    from lmcache_client.contract.messages import Clear, Cleared
    from lmcache_server.commands import control

    reply = control.ask(host, port, Clear(everything=True), Cleared, timeout_s)
    click.echo(f"forgot {reply.chunks} chunk{'' if reply.chunks == 1 else 's'}")


@cli.command()
@_control_options
def ping(host: str, port: int, timeout_s: float) -> None:
    """Ask whether a server answers.

    The exit code is 0 when it does and 1 when it does not.
    """
    import time

    from lmcache_client.contract.messages import Done, Ping
    from lmcache_server.commands import control

    started_s = time.perf_counter()
    control.ask(host, port, Ping(), Done, timeout_s)
    click.echo(f"the server answers, after {1000 * (time.perf_counter() - started_s):.1f} ms")


@cli.command()
@configuration.options("host", "port", "l1_size_gb", "l1_path", "l1_hugetlb")
@click.option("--json", "as_json", is_flag=True, help="Print the checks as a JSON array.")
@click.pass_context
def doctor(context: click.Context, /, as_json: bool, **options: Any) -> int:
    """Check this machine, this Python environment and a running server.

    Prints one line for each check, and the fix where something is wrong. Run it as the server's user.
    Options that you leave out come from the running server. The exit code is 1 when a check fails.
    """
    import dataclasses
    import json

    from lmcache_server.commands.doctor.checks import COLOURS
    from lmcache_server.commands.doctor.examine import examine
    from lmcache_server.host.preflight import FAIL

    flags = {name for name in options if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    checks = examine(options, flags)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    for check in () if as_json else checks:
        verdict = click.style(f"{check.verdict:<6}", fg=COLOURS[check.verdict])
        line = f"{check.name}: {check.finding}" + (f" -> {check.fix}" if check.fix else "")
        click.echo(verdict + printable(line))
    return EXIT_FAILED if any(check.verdict == FAIL for check in checks) else 0


def _count(flag: str, default: int, meaning: str, most: int | None = 1024) -> Callable[[Command], Command]:
    return click.option(flag, type=click.IntRange(1, most), default=default, show_default=True, help=meaning)


@cli.command()
@_control_options
@_count("--workers", 1, "Number of engines that store and load.")
@_count("--clients", 1, "Number of engines that only look up.")
@_count("--page-kb", 64, "KiB per page.", 1 << 16)
@_count("--layers", 16, "Layers (pages per block).")
@click.option(
    "--groups",
    type=click.Choice(["full", "hybrid"]),
    default="full",
    show_default=True,
    help="Only full attention, or also a sliding-window and a recurrent group.",
)
@_count("--chunks", 4, "Chunks per request.")
@_count("--requests", 20, "Requests per engine.", None)
@click.option(
    "--only",
    default="lookup,store,load",
    show_default=True,
    metavar="LIST",
    help="What to measure; load also measures store, first.",
)
@click.option("--json", "as_json", is_flag=True, help="Print settings and figures as JSON.")
def bench(host: str, port: int, timeout_s: float, as_json: bool, **settings: Any) -> None:
    """Measure a running server with synthetic engines.

    A chunk has 4 blocks, and a block has a page in each layer. Lookups ask for 1 to 512 small chunks. The
    bench fills at most a quarter of L1. No engine can use its chunks, and the server forgets them when the
    bench ends. Engines that are served meanwhile are slower.
    """
    import json

    from lmcache_client.contract.endpoint import address
    from lmcache_server.commands import control
    from lmcache_server.commands.bench import run

    report = control.report(host, port, timeout_s)
    crews = run.crews(f"lmcache bench {os.urandom(8).hex()}", report["config"]["chunk_size"], **settings)
    click.echo(run.announcement(crews, report["l1"]), err=True)
    results = run.run(address(host, port), crews)
    settings |= {"chunk_size": crews[0].workload.chunk_size}
    whole = {"server_version": report["version"], "settings": settings, "results": results}
    click.echo(json.dumps(whole, indent=2) if as_json else run.table(results))


def _vllm_options(command: Command) -> Command:
    """The options of a command that talks to vLLM."""
    for option in (
        click.option(
            "--timeout-s",
            type=click.FloatRange(1),
            default=600,
            show_default=True,
            help="Seconds for one answer.",
        ),
        click.option("--api-key", envvar="VLLM_API_KEY", help="vLLM's --api-key.  [env: VLLM_API_KEY]"),
        click.option("--model", help="The model to ask, if vLLM serves several.  [default: the first]"),
    ):
        command = option(command)
    return command


@cli.command()
@click.argument("url")
@click.argument("prompts_file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@_vllm_options
@configuration.options("host", "port")
def warm(url: str, prompts_file: Path, host: str, port: int, **options: Any) -> int:
    """Fill the cache: send the prompts of FILE through vLLM at URL.

    FILE has a prompt on each line: text, a JSON string, or a JSON list of token ids. vLLM computes each and
    generates one token. After each, prints the changes of the server's counters, which include the requests
    of other users.

    The exit code is 1 when the server dropped something, or neither stored nor had anything.
    """
    from lmcache_server.commands import control, warm
    from lmcache_server.commands.verify import prompts
    from lmcache_server.commands.verify.engine import VllmServer

    vllm = VllmServer(url, **options)
    vllm.counters()
    cases = prompts.from_file(prompts_file)

    def read() -> warm.Counts:
        return warm.counts(control.report(host, port, CONTROL_TIMEOUT_S))

    right, verdict = warm.verdict(warm.warm(vllm, cases, read, click.echo))
    click.echo(f"all: {verdict}")
    return 0 if right else EXIT_FAILED


@cli.command()
@click.argument("url")
@_vllm_options
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Prompts, one per line: text, a JSON string, or a JSON list of token ids.  [default: built in]",
)
@click.option(
    "--tokens",
    "lengths",
    multiple=True,
    type=click.IntRange(1),
    metavar="N",
    help="Length of a built-in prompt; may be given several times.  [default: four lengths up to 8192]",
)
@click.option("--json", "as_json", is_flag=True, help="Print figures and verdict as JSON.")
def verify(
    url: str, prompts_file: Path | None, lengths: tuple[int, ...], as_json: bool, **options: Any
) -> int:
    """Check that vLLM at URL answers the same with the cache as without it, whatever its model.

    Sends each prompt at temperature 0. vLLM computes it twice, which shows the engine's own noise. After a
    reset of vLLM's own prefix cache, it answers from the server's cache. Compares tokens and log
    probabilities. Start vLLM with VLLM_SERVER_DEV_MODE=1 for the reset, and let nobody else use it meanwhile.
    The prompts stay in the cache until they are evicted; nobody else can use them.

    The exit code is 1 when something differs or nothing was served.
    """
    import json

    from lmcache_server.commands.verify import prompts, run
    from lmcache_server.commands.verify.engine import VllmServer

    vllm = VllmServer(url, **options)
    vllm.counters()
    cases = prompts.from_file(prompts_file) if prompts_file else prompts.built_in(vllm, lengths)
    click.echo(printable(f"{vllm.url}, {vllm.model}: {len(cases)} prompts, one at a time"), err=True)
    if not as_json:
        click.echo(run.HEADER)
    results = run.run(vllm, cases, lambda result: None if as_json else click.echo(result.line()))
    right, verdict = run.verdict(results)
    rows = [result.row() for result in results]
    report = {"url": vllm.url, "model": vllm.model, "prompts": rows, "right": right, "verdict": verdict}
    click.echo(json.dumps(report, indent=2) if as_json else verdict)
    return 0 if right else EXIT_FAILED


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: every expected error is one line on stderr and an exit code, without a traceback."""
    try:
        # The command's return value, or the exit code of --help and the like; None counts as 0.
        sys.exit(cli.main(args=arguments, prog_name="lmcache", standalone_mode=False))
    except click.UsageError as error:
        help_hint = f" (see '{error.ctx.command_path} --help')" if error.ctx is not None else ""
        _end(EXIT_USAGE, f"{error.format_message()}{help_hint}")
    except click.ClickException as error:
        _end(error.exit_code, error.format_message())
    except StartError as error:
        _end(EXIT_USAGE, str(error))
    except CommandError as error:
        _end(EXIT_FAILED, str(error))
    except click.Abort:
        sys.exit(EXIT_FAILED)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        # At its end, the process writes the rest of the buffer of stdout, which would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _end(EXIT_FAILED, f"cannot write the output: {error.strerror}")


def _end(code: int, reason: str) -> NoReturn:
    click.echo(f"lmcache: {printable(reason)}", err=True)
    sys.exit(code)
