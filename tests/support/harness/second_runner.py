"""vLLM's second model runner ("V2", which GPUs use) on a CPU.

It prepares every step with kernels in Triton's language, and no compiler of Triton makes code for a CPU here.
Triton itself brings an interpreter for debugging: it runs the same source, one program of the grid after the
other, on the same addresses. So no kernel is written anew: vLLM's own run. All this in the engine's process,
and nowhere else.
"""

import importlib
import inspect
import os
import re
import sys
from types import FunctionType
from typing import Any

PACKAGES = ("vllm.v1.worker.gpu.", "vllm.v1.worker.utils.", "vllm.v1.worker.mamba_utils.")
"""Where the kernels are that the second runner launches."""
KERNEL = re.compile(r"^@triton\.jit(?:\([^)]*\))?\ndef (\w+)", re.M)


def supply() -> None:
    """From now on, engines of this process have the second model runner; call before one is made."""
    import vllm.v1.worker.cpu.model_runner  # noqa: F401
    from vllm.config import vllm as config
    from vllm.v1.worker import gpu_worker

    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    # Only what asks for the runner is told so: the models' own kernels have other replacements on a CPU.
    config.HAS_TRITON = gpu_worker.HAS_TRITON = True
    triton = _interpreting_triton()
    modules = [sys.modules[name] for name in list(sys.modules) if f"{name}.".startswith(PACKAGES)]
    interpreted = {}
    for module in filter(lambda module: hasattr(module, "tl"), modules):
        for name in KERNEL.findall(inspect.getsource(module)):
            kernel = getattr(module, name)
            interpreted[kernel] = triton.runtime.interpreter.InterpretedFunction(kernel)
        vars(module).update(tl=triton.language, triton=triton)
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value in interpreted:
                setattr(module, name, interpreted[value])


def _interpreting_triton() -> Any:
    """Triton, imported anew: what it is for is decided when it is imported."""
    for name in [name for name in sys.modules if name == "triton" or name.startswith("triton.")]:
        if not name.startswith("triton._C"):
            del sys.modules[name]
    os.environ["TRITON_INTERPRET"] = "1"
    triton = importlib.import_module("triton")
    importlib.import_module("triton.language")
    importlib.import_module("triton.runtime.interpreter")
    return triton
