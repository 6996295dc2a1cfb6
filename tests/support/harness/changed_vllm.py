"""vLLM, changed as a later one might be, in a process that was forked when vLLM was imported.

A change is a program, run before anything of the connector is imported.
"""

import subprocess
import sys

from harness.engine import COMMAND_TIMEOUT_S, Engine
from harness.processes import run_forked

# What vLLM logs in the fork would go where the program prints.
_LOG_APART = """
import logging, sys
for handler in logging.getLogger("vllm").handlers:
    handler.setStream(sys.stderr)
"""


def version(number: str) -> str:
    """vLLM has another version."""
    return f"import vllm\nvllm.__version__ = {number!r}\n"


def without(place: str, name: str) -> str:
    """A class, as `module:name`, has lost an attribute."""
    return f"import pkgutil\ndelattr(pkgutil.resolve_name({place!r}), {name!r})\n"


def not_importable(module: str, name: str) -> str:
    """A name cannot be imported from a module any longer, which goes on using it under another."""
    return f"""
import importlib, sys, types
module = importlib.import_module({module!r})
shown = types.ModuleType(module.__name__)
shown.__dict__.update(vars(module))
del shown.{name}
sys.modules[module.__name__] = shown
"""


def change(program: str) -> None:
    """Run a change here. Who then asks for the connector imports it, and finds vLLM as it is now."""
    rooms = ("lmcache_client.connector.", "lmcache_client.options.")
    for name in [name for name in sys.modules if f"{name}.".startswith(rooms)]:
        del sys.modules[name]
    exec(program, {"__name__": "__main__"})


def run_python(program: str, change: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a program in a process that has imported this vLLM, and nothing of the connector."""
    environment = Engine("llama").environment
    return run_forked("engine", ["-c", f"{_LOG_APART}{change}", program], environment, COMMAND_TIMEOUT_S)
