"""Layers whose KV cache vLLM does not share between requests, beside those of any tiny model.

vLLM runs the models that have such layers on GPUs only (DeepSeek-V4.1, GLM-5 Next, Qwen4 Exp). Here a layer
that nobody reads asks for the same kind of cache. So vLLM's own scheduler, block tables and planning do what
they do for those models, and the answers stay those of the tiny model. In the engine's process only.
"""

from typing import Any

REPLAYED_TOKENS = 64


def supply(kinds: list[str]) -> None:
    """Adds a layer of each kind, "ring" or "replayed", to the models that this process will load."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load = CPUModelRunner.load_model

    def load_model(runner: Any, *arguments: Any, **more: Any) -> None:
        load(runner, *arguments, **more)
        context = runner.vllm_config.compilation_config.static_forward_context
        layers = dict(context)
        context.clear()
        # Before the model's own, so that vLLM's indexes of its groups are not those of the connector.
        names = (f"scratch.{1000 + number}" for number in range(len(kinds)))  # no layer of the model has
        full = next(layer for layer in layers.values() if isinstance(layer, Attention))
        context.update({name: _layer(kind, full) for name, kind in zip(names, kinds, strict=False)})
        context.update(layers)

    CPUModelRunner.load_model = load_model


def _layer(kind: str, beside: Any) -> Any:
    """A layer whose pages are as large as those of the layer `beside`."""
    import torch
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backend import AttentionMetadataBuilder
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_interface import CircularBufferSpec, SlidingWindowMLASpec

    class Builder(AttentionMetadataBuilder):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)

        def build(self, *_: Any, **__: Any) -> None:
            """No layer reads it."""

    class Backend(CPUAttentionBackend):
        @staticmethod
        def get_builder_cls() -> Any:
            return Builder

    class Layer(torch.nn.Module, AttentionLayerBase):
        def get_attn_backend(self) -> Any:
            return Backend

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            # vLLM gives all blocks pages of one size, and would make larger blocks of smaller pages.
            model = beside.get_kv_cache_spec(vllm_config)
            latent = {"num_kv_heads": 1, "dtype": torch.bfloat16}
            if kind == "ring":
                padded = {"page_size_padded": model.page_size_bytes}
                return CircularBufferSpec(block_size=32, head_size=32, head_size_v=0, **padded, **latent)
            return SlidingWindowMLASpec(
                block_size=model.block_size,
                head_size=model.page_size_bytes // model.block_size // 2,
                sliding_window=REPLAYED_TOKENS,
                bounded_replay=True,
                **latent,
            )

    return Layer()
