"""Prints docs/command-line.md, made from the same commands as `lmcache --help`.

python scripts/command_line.py > docs/command-line.md
"""

import click

from lmcache_server.commands.cli import cli

HEAD = """# Command line

`python scripts/command_line.py` generates this page from the commands, and a test keeps it up to date.
`lmcache COMMAND --help` prints the same text.

The exit code is 0 for success, 1 for failure, and 2 if the command cannot run with these options. Every error
is one line on stderr. Flags of LMCache get one line each, then the command without them.

Every option of `lmcache server` is also an environment variable (`LMCACHE_L1_SIZE_GB=100`) and a key of a
TOML file (`l1_size_gb = 100`) that `--config` or `LMCACHE_CONFIG` names. A flag wins over the environment,
and the environment over the file. `LMCACHE_RUNTIME_DIR` names the directory of the Unix sockets; it must be
the same for the server and the engines. The default is a directory of the user.

Commands that ask a running server find it by `--host` and `--port`, their variables or the same file, and
wait `--timeout-s` seconds (default 10) for its answer. Over TCP, `--key-file` names a file with the server's
key, if it has one. Below, these are *the options of an asking command*.
These commands have them: {asking}.
"""
ASKING = ("--config", "--host", "--port", "--key-file", "--timeout-s")


def option_row(option: click.Option) -> str:
    names = " / ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    context = click.Context(cli)
    value = ""
    if not option.is_flag:
        is_number = isinstance(option.type, click.types.IntParamType | click.types.FloatParamType)
        value = option.metavar or ("NUMBER" if is_number else option.make_metavar(context))
    _, text = option.get_help_record(context) or ("", "")
    row = f"| {names} {value.replace('|', '&#124;')} | {text} |"
    return row.replace("<", "&lt;").replace("\n", " ").replace("  ", " ")


USUAL = [option_row(each) for each in cli.commands["status"].params if isinstance(each, click.Option)]


def asks(command: click.Command) -> bool:
    return {*ASKING} <= {param.opts[0] for param in command.params}


def section(name: str, command: click.Command) -> str:
    arguments = [param.human_readable_name for param in command.params if isinstance(param, click.Argument)]
    options = [param for param in command.params if isinstance(param, click.Option)]
    paragraphs = [" ".join(paragraph.split()) for paragraph in (command.help or "").split("\n\n")]
    parts = [f"## {' '.join(['lmcache', name, *arguments])}", *paragraphs]
    if asks(command):
        parts.append("Takes the options of an asking command.")
        # Those that mean something else here, such as another time, stay.
        options = [each for each in options if each.opts[0] not in ASKING or option_row(each) not in USUAL]
    if options:
        parts.append("\n".join(["| option | meaning |", "|---|---|", *map(option_row, options)]))
    return "\n\n".join(parts) + "\n"


def page() -> str:
    """The whole page, as Markdown."""
    asking = [f"`lmcache {name}`" for name, command in cli.commands.items() if asks(command)]
    head = HEAD.format(asking=", ".join(asking))
    return "\n".join([head, *(section(name, command) for name, command in cli.commands.items())])


if __name__ == "__main__":
    print(page(), end="")
