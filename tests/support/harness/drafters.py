"""Tiny drafters for speculative decoding, and models of which they guess right now and then.

The embeddings of these models are larger than the tiny models': the last token then decides most of the next
one, but not all, so a drafter that sees the last token is often right, and not always.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.models import WEIGHT_STD, configs, model_path

RECIPE = 2
"""To be raised when the weights of a drafter change."""
EMBEDDING_SCALES = {"llama": 250.0, "gemma3": 12.0, "gptoss": 60.0, "dsv2": 250.0}
RECURRENT_SCALE = 200.0
EMBEDDING_TO_1 = 1 / (WEIGHT_STD * EMBEDDING_SCALES["llama"])
NUM_HEADS = 3
AUX_LAYERS = (1, 2, 3)

Weights = dict[str, Any]
HEADS = {"qwen3next": "num_nextn_predict_layers", "qwen35": "mtp_num_hidden_layers"}
"""The recurrent models that get a head, and the entry of config.json that says so."""
LAST = "model.layers.3."
"""The last layer of the tiny Llama, from which its drafters are made."""


def target_path(name: str) -> Path:
    """The directory of the tiny model `name` with larger embeddings."""
    return _made(name, "louder", lambda config, weights: (config, weights))


def draft_model_path(name: str, heads: int = 2) -> Path:
    """A Llama of one layer that drafts for `target_path(name)`: it has its embeddings and output layer, and
    `heads` heads of keys and values."""
    kind = "draft" if heads == 2 else f"draft-{heads}"
    return _made(name, kind, lambda _, weights: _draft_model(weights, heads))


def eagle_path() -> Path:
    """An EAGLE head for `target_path("llama")`: its last layer, which sees the token and the hidden state."""
    return _made("llama", "eagle", _eagle)


def eagle3_path() -> Path:
    return _made("llama", "eagle3", _eagle3)


def medusa_path() -> Path:
    return _made("llama", "medusa", _medusa)


def dflash_path() -> Path:
    return _made("llama", "dflash", _dflash)


def mimo_path(modules: int = 1) -> Path:
    return _made("llama", f"mimo{modules}", lambda config, weights: _mimo(config, weights, modules))


def deepseek_path() -> Path:
    return _made("dsv2", "mtp", _deepseek)


def recurrent_path(name: str) -> Path:
    """The tiny recurrent model `name` with larger embeddings and, where vLLM has one for it, an MTP head."""
    return _made(name, "drafting", lambda config, weights: _recurrent(name, config, weights))


def _made(name: str, kind: str, change: Callable[[Weights, Weights], tuple[Weights, Weights]]) -> Path:
    """The directory with what `change` makes of the model `name`; made when missing, always the same."""
    import torch
    from safetensors.torch import load_file, save_file

    origin = model_path(name)
    path = origin.with_name(f"{origin.name}-{kind}-{RECIPE}")
    if not path.is_dir():
        weights = load_file(origin / "model.safetensors")
        first = 1 if name in EMBEDDING_SCALES else 0  # token 0 is DFlash's mask
        weights["model.embed_tokens.weight"][first:] *= EMBEDDING_SCALES.get(name, RECURRENT_SCALE)
        torch.manual_seed(1)
        config, weights = change(configs()[name], weights)
        weights = {key: each.to(torch.bfloat16).contiguous() for key, each in weights.items()}
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            save_file(weights, made / "model.safetensors", {"format": "pt"})
            (made / "config.json").write_text(json.dumps(config, indent=1))
            made.rename(path)
    return path


def _mixed(hidden: int, *parts: float) -> Any:
    """The matrix of a layer that adds its inputs, each of size `hidden`, with these weights."""
    import torch

    return torch.cat([part * torch.eye(hidden) for part in parts], dim=1)


def _draft_model(weights: Weights, heads: int) -> tuple[Weights, Weights]:
    from safetensors.torch import load_file

    llama = load_file(model_path("llama") / "model.safetensors")
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    draft = {key: llama[key] for key in llama if ".layers." not in key or ".layers.0." in key}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        draft[f"model.layers.0.{name}.weight"] *= 0.3
    for name in ("k_proj", "v_proj"):
        key = f"model.layers.0.self_attn.{name}.weight"
        draft[key] = draft[key][: heads * configs()["llama"]["head_dim"]]
    config = {**configs()["llama"], "num_hidden_layers": 1, "num_key_value_heads": heads}
    return config, draft | {key: weights[key] for key in ends}


def _eagle(config: Weights, weights: Weights) -> tuple[Weights, Weights]:
    head = {f"layers.0.{key.removeprefix(LAST)}": weights[key] for key in weights if key.startswith(LAST)}
    head.pop("layers.0.input_layernorm.weight")
    head["fc.weight"] = _mixed(config["hidden_size"], EMBEDDING_TO_1, 0.1)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        head[f"layers.0.{name}.weight"] *= 0.03
    return {**config, "num_hidden_layers": 1}, head


def _eagle3(config: Weights, weights: Weights) -> tuple[Weights, Weights]:
    """Its residual stream begins with hidden states of the token before; the layer's attention sees the
    token, too."""
    import torch

    hidden = config["hidden_size"]
    head = {f"midlayer.{key.removeprefix(LAST)}": weights[key] for key in weights if key.startswith(LAST)}
    key = head["midlayer.self_attn.k_proj.weight"].view(2, 32, hidden)
    value = torch.linalg.qr(torch.randn(hidden, 64))[0].T
    # Each token attends to itself most, and reads its own embedding, as far as it fits.
    head["midlayer.self_attn.q_proj.weight"] = key.repeat_interleave(2, 0).view(hidden, hidden)
    head["midlayer.self_attn.v_proj.weight"] = value
    head["midlayer.self_attn.o_proj.weight"] = (
        value.view(2, 32, hidden).repeat_interleave(2, 0).view(hidden, hidden).T
    )
    head["midlayer.mlp.down_proj.weight"] *= 0.02
    for name in "qkv":
        own = head[f"midlayer.self_attn.{name}_proj.weight"]
        head[f"midlayer.self_attn.{name}_proj.weight"] = torch.cat([own, 0.1 * own], dim=1)
    head["midlayer.hidden_norm.weight"] = torch.ones(hidden)
    head["norm.weight"] = torch.ones(hidden)
    head["fc.weight"] = 1e-4 * torch.randn(hidden, len(AUX_LAYERS) * hidden)
    head["lm_head.weight"] = weights["lm_head.weight"]
    changes = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": config["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
    }
    return {**config, **changes}, head


def _medusa(config: Weights, weights: Weights) -> tuple[Weights, Weights]:
    """Head i looks up which token follows i + 1 steps after each one, if the last token decides alone."""
    import torch

    embeddings = torch.nn.functional.normalize(weights["model.embed_tokens.weight"].float(), dim=1)
    follows = (embeddings @ weights["lm_head.weight"].float().T).argmax(dim=1)
    heads, token = {}, follows
    for number in range(NUM_HEADS):
        token = follows[token]
        heads[f"lm_heads.{number}.weight"] = torch.zeros_like(embeddings).index_add_(0, token, embeddings)
        heads[f"blocks.{number}.layers.0.weight"] = torch.zeros(2 * [config["hidden_size"]])
    sizes = {key: config[key] for key in ("hidden_size", "vocab_size")}
    kind = {"architectures": ["MedusaModel"], "model_type": "medusa", "dtype": "bfloat16"}
    return {**kind, **sizes, "num_heads": NUM_HEADS, "num_hidden_layers": 1}, heads


def _dflash(config: Weights, weights: Weights) -> tuple[Weights, Weights]:
    import torch

    hidden = config["hidden_size"]
    head = {f"layers.0.{key.removeprefix(LAST)}": weights[key] for key in weights if key.startswith(LAST)}
    for name in "qk":
        # Each query attends to a few tokens only, so that the drafts tell one context from another.
        head[f"layers.0.self_attn.{name}_norm.weight"] = 3 * torch.ones(config["head_dim"])
    head |= {"hidden_norm.weight": torch.ones(hidden), "norm.weight": torch.ones(hidden)}
    head["fc.weight"] = WEIGHT_STD * torch.randn(hidden, len(AUX_LAYERS) * hidden)
    changes = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": list(AUX_LAYERS)},
    }
    return {**config, **changes}, head


def _mimo(config: Weights, weights: Weights, modules: int) -> tuple[Weights, Weights]:
    import torch

    hidden, last = config["hidden_size"], [key for key in weights if key.startswith(LAST)]
    for layer in range(config["num_hidden_layers"]):
        for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            size = config[heads] * config["head_dim"]
            weights[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = torch.zeros(size)
        weights[f"model.layers.{layer}.self_attn.v_proj.bias"] = torch.zeros(size)
    for module in range(modules):
        start = f"model.mtp_layers.{module}."
        last = [key for key in weights if key.startswith(LAST)]
        weights |= {f"{start}{key.removeprefix(LAST)}": weights[key].clone() for key in last}
        for norm in ("token", "hidden", "final"):
            weights[f"{start}{norm}_layernorm.weight"] = torch.ones(hidden)
        weights[f"{start}input_proj.weight"] = _mixed(hidden, 1.0, 9.0)
    kind = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}
    return {**config, **kind, "num_nextn_predict_layers": modules}, weights


def _recurrent(name: str, config: Weights, weights: Weights) -> tuple[Weights, Weights]:
    """The head is the target's last layer, which sees the next token and a little of the hidden state."""
    # With positions in several dimensions, vLLM's CPU build 0.32 crashes in a head that drafts.
    for entry in ("mrope_section", "mrope_interleaved"):
        config["rope_parameters"].pop(entry, None)
    if name in HEADS:
        config[HEADS[name]] = 1
        last = f"model.layers.{config['num_hidden_layers'] - 1}."
        for key in [key for key in weights if key.startswith(last)]:
            weights[f"mtp.layers.0.{key.removeprefix(last)}"] = weights[key].clone()
        for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
            weights[f"mtp.{norm}.weight"] = weights["model.norm.weight"].clone()
        weights["mtp.fc.weight"] = _mixed(config["hidden_size"], RECURRENT_SCALE, 1.0)
    return config, weights


def _deepseek(config: Weights, weights: Weights) -> tuple[Weights, Weights]:
    import torch

    hidden, number = config["hidden_size"], config["num_hidden_layers"]
    last = f"model.layers.{number - 1}."
    start = f"model.layers.{number}."
    weights |= {
        f"{start}{key.removeprefix(last)}": weights[key].clone()
        for key in list(weights)
        if key.startswith(last)
    }
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{start}{norm}.weight"] = torch.ones(hidden)
    weights[f"{start}eh_proj.weight"] = _mixed(hidden, 9.0, 1.0)
    weights[f"{start}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    weights[f"{start}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    kind = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return {**config, **kind, "num_nextn_predict_layers": 1, "first_k_dense_replace": number + 1}, weights
