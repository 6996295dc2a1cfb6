"""The commands `lmcache warm`, `pin` and `unpin`."""

from pathlib import Path
from typing import Any

import click

from lmcache_server.commands import ends, shared_flags
from lmcache_server.commands.shared_flags import CONTROL_TIMEOUT_S, Address


def _warm(url: str, prompts_file: Path, server: Address, name: str, options: dict[str, Any]) -> int:
    """Sends prompts through vLLM, pins them under `name` unless that is empty, and prints what is held."""
    from lmcache_client.contract.messages import Pin, Pinned
    from lmcache_server.commands import control
    from lmcache_server.commands.verify import prompts
    from lmcache_server.commands.verify.engine import VllmServer
    from lmcache_server.options.pins.warm import send, verdict

    vllm = VllmServer(url, **options)
    vllm.counters()
    cases = prompts.from_file(prompts_file)

    def ask(name: str, request: str) -> Pinned:
        return control.ask(server, Pin(name, request), Pinned, CONTROL_TIMEOUT_S)

    right, told = verdict(send(vllm, cases, ask, name, click.echo))
    click.echo(f"all: {told}")
    return 0 if right else ends.EXIT_FAILED


@click.command()
@shared_flags.sending
def warm(url: str, prompts_file: Path, server: Address, **options: Any) -> int:
    """Fill the cache: send the prompts of FILE through vLLM at URL.

    FILE has a prompt on each line: text, a JSON string, or a JSON list of token ids. For each prompt, vLLM
    computes it and generates one token, and then the command prints how much of it the server holds.

    The exit code is 1 when the server does not hold all prompts.
    """
    return _warm(url, prompts_file, server, "", options)


@click.command()
@shared_flags.sending
@click.option("--name", help="The name of the pin, for unpin.  [default: the name of FILE]")
def pin(url: str, prompts_file: Path, name: str | None, server: Address, **options: Any) -> int:
    """Keep the prompts of FILE in the cache: send and pin them.

    It sends the prompts through vLLM at URL, and pins their chunks: the server does not evict them until
    'lmcache unpin' or 'lmcache clear'. FILE is the same as for 'lmcache warm'. Pinned chunks take at most
    half of L1: the command stops at a prompt that would take more, and if they grow, the newest names end. A
    name that is pinned already keeps its prompts and gets these as well. 'lmcache status' lists the names.

    The exit code is 1 when the server does not hold all prompts.
    """
    return _warm(url, prompts_file, server, _pin_name(prompts_file.name if name is None else name), options)


def _pin_name(name: str) -> str:
    from lmcache_client.contract.messages import MAX_PIN_NAME

    if not name.isprintable() or not 0 < len(name) <= MAX_PIN_NAME:
        raise click.UsageError(f"a name has 1 to {MAX_PIN_NAME} printable characters: pass another")
    return name


@click.command()
@click.argument("name", required=False)
@click.option("--all", "everything", is_flag=True, help="End all pins.")
@shared_flags.control_flags
def unpin(name: str | None, everything: bool, server: Address, timeout_s: float) -> None:
    """End the pins of NAME, or all pins.

    From now on the server may evict their chunks. At first they count as just used.
    """
    from lmcache_client.contract.messages import Unpin, Unpinned
    from lmcache_server.commands import control

    if everything == bool(name):
        raise click.UsageError("pass a name or --all: 'lmcache status' lists the names")
    reply = control.ask(server, Unpin(_pin_name(name) if name else ""), Unpinned, timeout_s)
    click.echo(f"unpinned {reply.chunks} chunk{'' if reply.chunks == 1 else 's'}")


COMMANDS = warm, pin, unpin
