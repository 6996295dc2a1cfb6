"""When a network port restores a prompt faster than GPUs compute it: `python benchmarks/ports.py`.

Arithmetic, no measurement. Prints Markdown. A host has eight GPUs and one port.

* Bytes of a prompt: a key and a value for each token, key-value head and layer with attention, or one latent vector
  of MLA; and one state for each recurrent layer, whatever the prompt's length. All from the models' published
  configurations, with two bytes for each element (the recurrent state: four).
* Work of a prompt: two operations for each active parameter and token, and the attention of each token with half of
  the prompt. GPUs do a share of what their data sheets promise without sparsity.
* A port carries a share of its nominal speed.
"""

from dataclasses import dataclass

GPUS, USED, CARRIED = 8, 0.4, 0.9
"""GPUs of a host; the share of their operations that a prefill reaches; the share of a port that carries pages."""
GPU_FLOPS = {"H100": 989e12, "B200": 2250e12}
"""Dense bfloat16 operations per second, from NVIDIA's data sheets."""
PORTS = {"100 Gb/s": 100e9 / 8, "400 Gb/s": 400e9 / 8}
LENGTHS = (2_048, 8_192, 32_768, 131_072)


@dataclass(frozen=True)
class Model:
    """`attention_layers` have a KV cache of `token_bytes` for a token, in each layer; `attention_width` is the sum of
    the widths of all heads with which a query meets a key and a value, halved. `state_bytes` belong to a prompt."""

    name: str
    active: float
    attention_layers: int
    token_bytes: int
    attention_width: float
    state_bytes: int = 0

    def bytes(self, tokens: int) -> float:
        return self.attention_layers * self.token_bytes * tokens + self.state_bytes

    def operations(self, tokens: int) -> float:
        attention = 4 * self.attention_width * self.attention_layers * tokens * tokens / 2
        return 2 * self.active * tokens + attention


MODELS = (
    # 80 layers, 64 query heads and 8 key-value heads of 128.
    Model("Llama-3-70B", 70.6e9, 80, 2 * 8 * 128 * 2, 64 * 128),
    # 48 layers, 12 of them with attention: 16 query heads and 2 key-value heads of 256. 36 Gated DeltaNet layers:
    # 32 value heads with a state of 128 x 128, and the last 3 inputs of a convolution over 8,192 channels.
    Model("Qwen3-Next-80B-A3B", 3e9, 12, 2 * 2 * 256 * 2, 16 * 256, 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)),
    # 61 layers of MLA: 512 + 64 elements for a token; 128 heads, of 192 with the key and 128 with the value.
    Model("DeepSeek-V3", 37e9, 61, 576 * 2, 128 * (192 + 128) / 2),
)


def restored(model: Model, tokens: int, port: float) -> float:
    """Tokens per second through a port."""
    return tokens * port * CARRIED / model.bytes(tokens)


def computed(model: Model, tokens: int, flops: float) -> float:
    """Tokens per second by the GPUs of a host."""
    return tokens * flops * GPUS * USED / model.operations(tokens)


def size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.0f} MB"


def main() -> None:
    heads = ["model", "prompt", "its pages", *PORTS, *(f"{GPUS} {gpu} compute" for gpu in GPU_FLOPS)]
    heads += [f"{port} : {GPUS} {gpu}" for gpu in GPU_FLOPS for port in PORTS]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for model in MODELS:
        for tokens in LENGTHS:
            ports = [restored(model, tokens, port) for port in PORTS.values()]
            gpus = [computed(model, tokens, flops) for flops in GPU_FLOPS.values()]
            cells = [model.name, f"{tokens:,}", size(model.bytes(tokens))]
            cells += [f"{each:,.0f}" for each in (*ports, *gpus)]
            cells += [f"{port / gpu:.1f}" for gpu in gpus for port in ports]
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
