"""The command `lmcache inspect`."""

import functools
import json
from pathlib import Path

import click

from lmcache_server.commands import ends, shared_flags
from lmcache_server.commands.shared_flags import Address


@click.command()
@click.argument("prompts_file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
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
    type=click.Path(dir_okay=False, path_type=Path),
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
