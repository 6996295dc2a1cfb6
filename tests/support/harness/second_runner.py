"""vLLM's second model runner ("V2", which GPUs use) on a CPU.

It prepares every step with kernels in Triton's language, which Triton compiles for GPUs alone. But Triton has
an interpreter to debug kernels: it runs the same source, one program of the grid after the other, at the same
addresses. So vLLM's own kernels run here, and none is written anew. All this in the engine's process, and
nowhere else.
"""

import importlib
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType, SimpleNamespace
from typing import Any

PACKAGES = ("vllm.v1.worker.gpu.", "vllm.v1.worker.utils.", "vllm.v1.worker.mamba_utils.")
"""Where the kernels are that the second runner launches."""
KERNEL = re.compile(r"^@triton\.jit(?:\([^)]*\))?\ndef (\w+)", re.M)


def supply() -> None:
    """From now on, engines of this process have the second model runner; call before one is made."""
    from vllm.config import vllm as config
    from vllm.v1.worker import gpu, gpu_worker, mamba_utils

    for package in pkgutil.walk_packages(gpu.__path__, f"{gpu.__name__}."):
        importlib.import_module(package.name)
    from vllm.v1.worker.gpu.spec_decode.ngram import speculator

    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    # Only the runner is told so: the models' own kernels have other replacements on a CPU.
    for each in (config, gpu_worker, speculator):
        each.HAS_TRITON = True
    _keep_async_scheduling()
    _interpret(_triton())
    # Programs of the grid that share a copy. Here, one does not wait for the others.
    mamba_utils._TEMPORAL_TILES = 1


def _keep_async_scheduling() -> None:
    """As on GPUs, vLLM plans a step before it has the output of the last one. On a CPU it would not."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        original(cls, config)
        config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _triton() -> Any:
    """Triton, imported anew: whether it compiles or interprets is decided when it is imported."""
    for name in [name for name in sys.modules if f"{name}.".startswith("triton.")]:
        if not name.startswith("triton._C"):
            del sys.modules[name]
    os.environ["TRITON_INTERPRET"] = "1"
    triton = importlib.import_module("triton")
    _mend(importlib.import_module("triton.runtime.interpreter"), triton.language)
    return triton


def _mend(interpreter: Any, language: Any) -> None:
    # It changes Triton's language before each kernel and back after it, which takes longer than most kernels
    # do. Nothing else here uses the language.
    for namespace in ({"tl": language}, {"core": language.core}):
        interpreter._patch_lang(SimpleNamespace(__globals__=namespace))
    interpreter._patch_lang = lambda _: SimpleNamespace(restore=lambda: None)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    # A mask that comes of comparing single numbers is not of the type that it expects.
    for name in ("create_masked_load", "create_masked_store"):
        setattr(type(builder), name, _with_mask(getattr(builder, name)))


def _with_mask(operation: Callable[..., Any]) -> Callable[..., Any]:
    place = list(inspect.signature(operation).parameters).index("mask")

    def masked(_builder: Any, *arguments: Any) -> Any:
        arguments[place].data = arguments[place].data.astype(bool)
        return operation(*arguments)

    return masked


def _interpret(triton: Any) -> None:
    """Each kernel that vLLM has not replaced by a function in C++ is interpreted from now on."""
    modules = [sys.modules[name] for name in list(sys.modules) if f"{name}.".startswith(PACKAGES)]
    interpreted = {}
    for module in filter(lambda module: hasattr(module, "tl"), modules):
        for name in KERNEL.findall(inspect.getsource(module)):
            if isinstance(kernel := getattr(module, name), FunctionType):
                interpreted[kernel] = triton.runtime.interpreter.InterpretedFunction(kernel)
        vars(module).update(tl=triton.language, triton=triton)
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value in interpreted:
                setattr(module, name, interpreted[value])
