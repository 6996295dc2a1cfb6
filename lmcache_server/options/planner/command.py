"""The command `lmcache plan`."""

import click

from lmcache_server.commands import shared_flags
from lmcache_server.host.units import GB_BYTES


@click.command()
@shared_flags.asking("l1_size_gb", l1_size_gb="With --from: the size of L1, in GB, that the table calls 1x.")
@click.option(
    "--from",
    "record",
    metavar="FILE",
    help="Read a file that `lmcache server --record` wrote, instead of asking a server.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def plan(
    server: shared_flags.Address, timeout_s: float, l1_size_gb: float, record: str | None, as_json: bool
) -> None:
    """Print the hit rates that other sizes of L1 would have had.

    For each size, the server simulates every lookup. For models with full attention alone, the rates are
    exact, unless a line says up to which size. For other models they are estimates.
    """
    import json

    from lmcache_server.commands import control
    from lmcache_server.options.planner.text import replayed, table

    if record is not None:
        l1_bytes = int(l1_size_gb * GB_BYTES)
        demand = replayed(record, l1_bytes)
    else:
        report = control.report(server, timeout_s)
        demand, l1_bytes = report["demand"], report["l1"]["total_bytes"]
    click.echo(json.dumps(demand, indent=2) if as_json else table(demand, l1_bytes, record is not None))
    if record is None and not as_json and report.get("tiers"):
        kept = "`lmcache server --record FILE` keeps lookups for `lmcache plan --from FILE`"
        click.echo(f"Not counted: lookups before the server started. {kept}.")


COMMANDS = (plan,)
