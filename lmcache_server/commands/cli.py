"""The command `lmcache`. Each subcommand imports what it needs when it runs, so that --help is quick."""

import dataclasses
import errno
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from lmcache_client.contract.key_file import KEY_BYTES
from lmcache_client.contract.version import VERSION
from lmcache_server import config as configuration
from lmcache_server.commands import ends, shared_flags
from lmcache_server.commands.shared_flags import Address
from lmcache_server.config import FLAGS
from lmcache_server.errors import CommandError, StartError
from lmcache_server.host.logs import printable
from lmcache_server.options import parts

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

OF_DOCTOR = [name for names in parts("flags", "OF_DOCTOR") for name in names]
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=_CONTEXT, invoke_without_command=True)
@click.version_option(VERSION, prog_name="lmcache")
@click.pass_context
def cli(context: click.Context) -> None:
    """A node-local KV cache server for vLLM."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(ends.EXIT_USAGE)


@cli.command()
@configuration.flags(*FLAGS)
def server(**values: Any) -> int:
    """Run the server until SIGTERM, SIGINT or SIGHUP.

    Each option may also be set by the environment variable shown, or by a key of the TOML file. A flag
    overrides the environment, the environment overrides the file, the file overrides the default.
    """
    config = configuration.checked(values)
    from lmcache_server.app import run

    return run(config)


@cli.command()
@shared_flags.control_flags
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--explain",
    is_flag=True,
    help="Print what the namespaces of the connected engines are made of. Engines share pages only if all of "
    "it is equal.",
)
@click.option(
    "--namespace", default="", metavar="DIGITS,DIGITS",
    help="Of the connected engines' namespaces that begin with these digits, print what differs.",
)  # fmt: skip
def status(server: Address, timeout_s: float, as_json: bool, explain: bool, namespace: str) -> None:
    """Print what a server holds: memory, models, sessions, hit rate."""
    from lmcache_server.commands import control
    from lmcache_server.commands.status import explanation, summary

    if as_json and namespace:
        raise click.UsageError("--json prints the whole report: leave out --namespace, or --json")
    report = control.report(server, timeout_s, explain or bool(namespace))
    names = tuple(filter(None, namespace.lower().split(",")))
    text = explanation(report, names) if explain or names else summary(report)
    click.echo(json.dumps(report, indent=2) if as_json else text)


@cli.command()
@shared_flags.asking(default_s=15.0)  # the server waits 10 s for its tiers
@click.option("--model", help="Only the chunks of this model, as `lmcache status` names it.")
@click.option("--namespace", help="Only the namespaces that begin with these digits.")
@click.option(
    "--salt",
    help="Only chunks of the cache_salt whose name in `lmcache status` begins with these digits.",
)
@click.option(
    "--tiers",
    is_flag=True,
    help="Delete their records in tiers, too, even those of other servers that share a tier. A record does "
    "not say which salt it had, so not with --salt.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was forgotten as a JSON object.")
def clear(server: Address, timeout_s: float, tiers: bool, as_json: bool, **only: str | None) -> None:
    """Make a server forget all chunks, or some of them.

    Without --tiers, their records in tiers stay, and the server fetches from there what is asked for again.
    Pins of forgotten chunks end. A chunk that a request is loading keeps its memory until then.
    """
    from lmcache_client.contract.messages import MAX_NAME, Clear, Cleared
    from lmcache_server.commands import control
    from lmcache_server.core.named_limits import is_tenant

    for name, value in only.items():
        if value is not None and not value.strip():  # such as "$NAMESPACE" without a value
            raise click.UsageError(f"--{name} is empty: name one, or leave it out")
    model, namespace, salt = (only[name] or "" for name in ("model", "namespace", "salt"))
    if salt and not is_tenant(salt.lower()):
        raise click.UsageError("--salt needs 8 or more hexadecimal digits: `lmcache status` shows them")
    if salt and tiers:
        raise click.UsageError("--tiers cannot be combined with --salt: clear the namespace with --namespace")
    names = (model, namespace.lower(), salt.lower())
    named = [name[:MAX_NAME].encode("utf-8", "replace").decode() for name in names]
    message = Clear(True, named[0], named[1], named[2], tiers)
    cleared = control.ask(server, message, Cleared, timeout_s)
    told, failed = f"forgot {cleared.chunks} chunk{'' if cleared.chunks == 1 else 's'}", cleared.tiers_failed
    done = [url for url in cleared.tiers if tiers and not any(why.startswith(f"{url}: ") for why in failed)]
    kept = () if tiers else cleared.tiers
    told += f" and their records in {' and '.join(done)}" if done else ""
    told += f"; records stay in {' and '.join(kept)}, unless you add --tiers" if kept else ""
    values = {"chunks": cleared.chunks, "tiers_kept": kept, "tiers_cleared": done, "tiers_failed": failed}
    click.echo(json.dumps(values) if as_json else printable(told))
    if failed:
        raise CommandError(f"these tiers were not cleared: {'; '.join(failed)}")


@cli.command()
@shared_flags.control_flags
def ping(server: Address, timeout_s: float) -> None:
    """Ask whether a server answers, and how fast.

    It prints the time of one request on an open connection. The exit code is 0 when a server answers, and 1
    when none does.
    """
    from lmcache_server.commands import control

    seconds = control.round_trip_s(server, timeout_s)
    click.echo(f"the server answers, after {1000 * seconds:.2f} ms")


@cli.command()
@shared_flags.addressing("l1_size_gb", "l1_hugetlb", *OF_DOCTOR)
@click.option("--json", "as_json", is_flag=True, help="Print the checks as a JSON array.")
@click.option("--gpu", "try_gpus", is_flag=True, help="Also try each GPU: map, pin, copy and compare 64 MiB.")
@click.pass_context
def doctor(context: click.Context, /, server: Address, as_json: bool, try_gpus: bool, **options: Any) -> int:
    """Check this machine, this Python environment and a running server.

    It prints one line for each check, and the fix where something is wrong. Run it as the server's user.
    Options that you leave out come from the running server. The exit code is 1 when a check fails.
    """
    from lmcache_server.commands.doctor.examine import examine
    from lmcache_server.commands.doctor.verdicts import COLOURS
    from lmcache_server.host.preflight import FAIL

    flags = {name for name in options if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    checks = examine(server, options, flags, try_gpus)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    for check in () if as_json else checks:
        verdict = click.style(f"{check.verdict:<6}", fg=COLOURS[check.verdict])
        line = f"{check.name}: {check.finding}" + (f" -> {check.fix}" if check.fix else "")
        click.echo(verdict + printable(line))
    return ends.EXIT_FAILED if any(check.verdict == FAIL for check in checks) else 0


@cli.command()
@shared_flags.control_flags
@shared_flags.count("--workers", 1, "Number of engines that store and load.")
@shared_flags.count("--clients", 1, "Number of engines that only look up.")
@shared_flags.count("--page-kb", 64, "KiB per page.", 1 << 16)
@shared_flags.count("--layers", 16, "Layers (pages per block).")
@click.option(
    "--groups",
    type=click.Choice(["full", "hybrid"]),
    default="full",
    show_default=True,
    help="Only full attention, or also a sliding-window and a recurrent group.",
)
@shared_flags.count("--chunks", 4, "Chunks per request.")
@click.option(
    "--requests",
    type=click.IntRange(1),
    help="Requests per engine.  [default: 20, or fewer if they would fill more than a quarter of L1]",
)
@click.option(
    "--seconds",
    type=shared_flags.Number(0.1),
    help="Measure each operation for this many seconds, instead of for a number of requests.",
)
@click.option(
    "--only",
    default="lookup,store,load",
    show_default=True,
    metavar="LIST",
    help="What to measure; load also measures store, first.",
)
@click.option("--json", "as_json", is_flag=True, help="Print settings and figures as JSON.")
def bench(server: Address, timeout_s: float, as_json: bool, **settings: Any) -> None:
    """Measure a running server with synthetic engines.

    A chunk has 4 blocks, and a block has a page in each layer. Lookups ask for 1 to 512 small chunks. The
    bench fills at most a quarter of L1. With --seconds, it fills the free part of L1 instead, and then its
    new chunks replace its old ones: engines lose at most a twentieth of L1. No engine can use the bench's
    chunks, and the server forgets them when the bench ends. Meanwhile the server answers engines more slowly.
    """
    from lmcache_client.contract.endpoint import address
    from lmcache_server.commands import control
    from lmcache_server.commands.bench import run

    report = control.report(server, timeout_s)
    chunk_size, l1 = report["config"]["chunk_size"], report["l1"]
    crews = run.crews(f"lmcache bench {os.urandom(8).hex()}", chunk_size, l1, **settings)
    click.echo(run.announcement(crews, l1), err=True)
    results = run.run(address(*server), crews)
    settings |= {"chunk_size": crews[0].workload.chunk_size}
    whole = {"server_version": report["version"], "settings": settings, "results": results}
    click.echo(json.dumps(whole, indent=2) if as_json else run.table(results))


@cli.command()
@click.argument("url")
@shared_flags.vllm_flags
@click.option(
    "--prompts",
    "prompts_file",
    type=shared_flags.FILE,
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
    """Compare vLLM's answers with the cache and without it.

    It works with every model that vLLM serves at URL. It sends each prompt at temperature 0. vLLM computes
    the prompt twice, which shows the engine's own noise. Then the command resets vLLM's own prefix cache, so
    that vLLM answers from the server's cache. It compares tokens and log probabilities. Start vLLM with
    VLLM_SERVER_DEV_MODE=1 for the reset, and let nobody else use it meanwhile. The prompts stay in the cache
    until they are evicted; nobody else can use them.

    The exit code is 1 if answers differ beyond that noise, if it is too large, or if nothing was served.
    """
    from lmcache_server.commands.verify import prompts, run
    from lmcache_server.commands.verify.engine import VllmServer

    if prompts_file and lengths:
        raise click.UsageError("--tokens is for the built-in prompts: leave it out, or --prompts")
    vllm = VllmServer(url, **options)
    vllm.counters()
    cases = prompts.from_file(prompts_file) if prompts_file else prompts.built_in(vllm, lengths)
    click.echo(printable(f"{vllm.url}, {vllm.model}: {len(cases)} prompts, one at a time"), err=True)
    # With --json, the lines only show how far it is.
    click.echo(run.HEADER, err=as_json)
    results = run.run(vllm, cases, lambda result: click.echo(result.line(), err=as_json))
    right, verdict = run.verdict(results)
    rows = [result.row() for result in results]
    report = {"url": vllm.url, "model": vllm.model, "prompts": rows, "right": right, "verdict": verdict}
    click.echo(json.dumps(report, indent=2) if as_json else verdict)
    return 0 if right else ends.EXIT_FAILED


@cli.command()
@click.argument("file", type=shared_flags.FILE)
def key(file: Path) -> None:
    """Make a key: write 32 random bytes to FILE, as hexadecimal digits.

    Give copies of FILE to the server and to all its clients: --key-file of 'lmcache server' and of the other
    commands, lmcache.mp.key_file of engines. Only its user can read FILE. The command overwrites no file.
    """
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise CommandError(f"{file} exists and may be in use: name another file") from None
    except OSError as error:
        raise CommandError(f"cannot write {file}: {error.strerror}") from error
    try:
        with open(descriptor, "w") as made:
            made.write(f"{os.urandom(KEY_BYTES).hex()}\n")
    except OSError as error:  # a full disk: what is left is no key
        file.unlink(missing_ok=True)
        raise CommandError(f"cannot write {file}: {error.strerror}") from error


@cli.command()
@click.argument("prompts_file", metavar="FILE", type=shared_flags.FILE)
@shared_flags.control_flags
@click.option("--url", help="vLLM's address. Needed if FILE has text, to make token ids of it.")
@click.option("--api-key", envvar="VLLM_API_KEY", help="vLLM's --api-key.  [env: VLLM_API_KEY]")
@click.option(
    "--model",
    default="",
    help="The model, as `lmcache status` names it.  [default: that of --url, or any with an engine]",
)
@click.option("--namespace", default="", help="Only the namespaces that begin with these digits.")
@click.option(
    "--salt-file",
    type=shared_flags.FILE,
    metavar="FILE",
    help="A file that has the cache_salt of the requests. A final newline is ignored.",
)
@click.option("--json", "as_json", is_flag=True, help="Print an array with an object for each prompt.")
def inspect(
    prompts_file: Path, server: Address, timeout_s: float, url: str | None, api_key: str | None,
    model: str, namespace: str, salt_file: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """Print how much of each prompt of FILE is cached.

    It looks in L1, the server's memory, and not in tiers.

    FILE has a prompt on each line: text, a JSON string, or a JSON list of token ids. The command prints what
    vLLM would load of each prompt, why not more, and which chunks of each group are there. vLLM computes
    nothing, no hit is counted, and nothing is kept from eviction.

    It cannot see prompts with images or adapters, nor what an engine stored after it has reset its cache.

    The exit code is 0 when the server has all that vLLM could load of every prompt, and 1 when not, or after
    an error.
    """
    from lmcache_client.contract.control import Inspected
    from lmcache_server.commands import control
    from lmcache_server.commands import inspect as inspecting
    from lmcache_server.commands.verify import prompts
    from lmcache_server.commands.verify.engine import VllmServer

    vllm = VllmServer(url, None, api_key, shared_flags.TOKENIZE_TIMEOUT_S) if url else None
    cases: list[tuple[str, list[int]]] = []
    for case in prompts.from_file(prompts_file):
        tokens = case.prompt
        if isinstance(tokens, str):
            if vllm is None:
                raise click.UsageError(f"{case.name} is text: pass --url, so that vLLM makes token ids of it")
            tokens = vllm.tokens(tokens)
        cases.append((case.name, tokens))
    salt = prompts.salt(salt_file) if salt_file else ""
    model = model or (vllm.root if vllm is not None and not namespace else "")
    ask = functools.partial(control.ask, server, expected=Inspected, timeout_s=timeout_s)
    places = inspecting.chosen(control.report(server, timeout_s), model, namespace.lower())
    rows = [inspecting.look(ask, *case, salt, place) for case in cases for place in places]
    click.echo(json.dumps(rows, indent=2) if as_json else "\n".join(map(inspecting.text, rows)))
    return 0 if all(map(inspecting.is_whole, rows)) else ends.EXIT_FAILED


for commands in parts("command", "COMMANDS"):
    for command in commands:
        cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: every expected error is a line on stderr and an exit code, without a traceback."""
    ends.open_standard_files()
    arguments = sys.argv[1:] if arguments is None else arguments
    ends.warn_of_lmcache()
    try:
        # The command's return value, or the exit code of --help and the like; None counts as 0.
        sys.exit(cli.main(args=arguments, prog_name="lmcache", standalone_mode=False))
    except click.UsageError as error:
        help_hint = f" (see '{error.ctx.command_path} --help')" if error.ctx is not None else ""
        lines = ends.advice(error, arguments) or [f"{error.format_message()}{help_hint}"]
        ends.end(ends.EXIT_USAGE, *lines, in_json=ends.logs_json(arguments))
    except click.ClickException as error:
        ends.end(error.exit_code, error.format_message())
    except StartError as error:
        ends.end(error.exit_code, str(error), in_json=ends.logs_json(arguments))
    except CommandError as error:
        ends.end(ends.EXIT_FAILED, str(error))
    except click.Abort:
        sys.exit(ends.EXIT_FAILED)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        # At its end, the process writes the rest of the buffer of stdout, which would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        ends.end(ends.EXIT_FAILED, f"cannot write the output: {error.strerror}")
