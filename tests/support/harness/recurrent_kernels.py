"""What vLLM's CPU build lacks for drafters on recurrent models: its two fused kernels that move states.

On a GPU, Triton compiles them (v1/worker/mamba_utils.py). Here they are the same decisions and the same
copies, one request after the other, at the same addresses. Two faults of the CPU build's convolutions are
mended, too. All this in the engine's process, and nowhere else.
"""

import ctypes
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any


def supply() -> None:
    """Put these kernels in the place of those that cannot be launched; call before the engine is made."""
    from vllm.v1.worker import mamba_utils

    mamba_utils.precopy_mamba_align_fused_kernel = _Launched(_precopy)
    mamba_utils.postprocess_mamba_fused_kernel = _Launched(_postprocess)


def mend() -> None:
    """Mend the convolutions of recurrent layers; call before the engine is made."""
    _mend_gated_delta_net()
    _mend_mamba()


class _Launched:
    """A function in the place of a kernel, which is launched as `kernel[grid](…)`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._function


class _States:
    """Where the state tensors lie, in the order of the kernels' arguments: one entry per tensor."""

    def __init__(self, tables: Any, stride: int, *entries: Any) -> None:
        self._tables, self._stride = tables.tolist(), stride
        self._entries = list(zip(*(each.tolist() for each in entries), strict=True))

    def copy(self, row: int, source: int, target: int, bias: int, rows_first: bool) -> None:
        """From one column of a request's block table to another. The window of a convolution moves by `bias`
        tokens; of the other states, the one that is `bias` columns further is taken."""
        for base, stride, element, inner, width, group, rows, row_stride in self._entries:

            def address(column: int, base: int = base, stride: int = stride, group: int = group) -> int:
                place = self._tables[group] + 4 * (row * self._stride + column)
                return int(base + ctypes.c_int32.from_address(place).value * stride)

            if not width:
                ctypes.memmove(address(target), address(source + bias), inner * element)
            elif not rows_first:
                token = inner * element
                ctypes.memmove(address(target), address(source) + bias * token, (width - bias) * token)
            else:
                for each in range(rows):
                    at = each * row_stride
                    start = address(source) + at + bias * element
                    ctypes.memmove(address(target) + at, start, (width - bias) * element)


def _precopy(
    running: Any, source: Any, bias: Any, *arguments: Any, CONV_STATE_DIM_FIRST: bool, **_: Any
) -> None:
    """Before a step: what the last step left moves into the block in which this step works."""
    *states, mapping, num_reqs = arguments
    assert mapping is None, "these are the kernels of the V1 model runner"
    places = _States(*states)
    for row in range(num_reqs):
        start, target = int(source[row]), int(running[row])
        if start >= 0 and start != target:
            places.copy(row, start, target, int(bias[row]), CONV_STATE_DIM_FIRST)


def _postprocess(
    accepted: Any,
    running: Any,
    scheduled: Any,
    computed: Any,
    drafts: Any,
    *arguments: Any,
    block_size: int,
    CONV_STATE_DIM_FIRST: bool,
    **_: Any,
) -> None:
    """After a step that accepted tokens up to or beyond the end of a block: the state at that end moves into
    the block that ends there."""
    *states, accepted_out, mapping, num_reqs = arguments
    assert mapping is None, "these are the kernels of the V1 model runner"
    places = _States(*states)
    for row in range(num_reqs):
        verified = int(computed[row]) + int(scheduled[row]) - int(drafts[row])
        end = (verified + int(accepted[row]) - 1) // block_size * block_size
        if end < verified:
            continue
        source, target, bias = int(running[row]), end // block_size - 1, end - verified
        if source == target:
            accepted_out[row] = 1
        if source != target or bias:
            places.copy(row, source, target, bias, CONV_STATE_DIM_FIRST)


def _mend_gated_delta_net() -> None:
    """vLLM 0.32: after a step with fewer drafts than the most, its CPU code leaves the convolution's window
    where the next step does not look for it. 0.33 has mended that; so are its lines here."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    text = inspect.getsource(gdn_attention._spec_forward)
    wrong = (
        "            keep = B[:, offset + 1 : offset + 1 + (state_len - q_i)]\n"
        "            new_B = torch.cat([keep, x_seq], dim=-1)\n"
        "            B.copy_(new_B)\n"
    )
    if wrong not in text:
        return
    text = text.replace(wrong, "            B[:, : width - 2 + q_i] = conv_in[0, :, 1:]\n")
    # A convolution in bfloat16 with a group for each channel takes longer than all else.
    slow = "F.conv1d(conv_in, w, bias, groups=dim)[0]"
    assert slow in text
    text = text.replace(slow, "(conv_in[0].unfold(1, width, 1).float() * w.float()).sum(-1).to(w.dtype)")
    only_full = "int(seq_lens[0].item()) > 0\n"
    assert only_full in text
    text = text.replace(only_full, "int(seq_lens[0].item()) == state_len - (width - 2)\n")
    exec(compile(text, "vLLM's gdn_attention.py, mended", "exec"), vars(gdn_attention))


def _mend_mamba() -> None:
    """vLLM 0.32 and 0.33: the convolution of Mamba-2 on a CPU ignores how many drafts were accepted, and that
    its window is wider where there is a drafter. This one does as vLLM's own for a GPU."""
    from vllm.model_executor.layers.mamba import mamba_mixer2

    mamba_mixer2.causal_conv1d_update = functools.partial(_update, mamba_mixer2.causal_conv1d_update)


def _update(
    original: Callable[..., Any],
    x: Any,
    windows: Any,
    weight: Any,
    bias: Any,
    activation: str,
    *,
    conv_state_indices: Any,
    num_accepted_tokens: Any,
    query_start_loc: Any,
    **others: Any,
) -> Any:
    import torch
    from torch.nn import functional

    history = weight.shape[1] - 1
    if num_accepted_tokens is None:
        return original(
            x,
            windows[:, :, :history],
            weight,
            bias,
            activation,
            conv_state_indices=conv_state_indices,
            query_start_loc=query_start_loc,
            **others,
        )
    assert activation == "silu"
    out, ends = torch.empty_like(x), query_start_loc.tolist()
    for row, (start, end) in enumerate(itertools.pairwise(ends)):
        if start == end:
            continue
        window, first = windows[conv_state_indices[row, 0]], int(num_accepted_tokens[row]) - 1
        past = window[:, first : first + history]
        seen = torch.cat([past, x[start:end].transpose(0, 1).to(window.dtype)], dim=-1)
        convolved = functional.conv1d(seen[None].to(weight.dtype), weight[:, None], bias, groups=len(weight))
        out[start:end] = functional.silu(convolved[0]).transpose(0, 1).to(out.dtype)
        window[:, : seen.shape[1] - 1] = seen[:, 1:]
    return out
