"""Tiny random models of several families, and independent oracles of steering."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import Cache, QuantizedCache, QuantizedLayer

SHAPE = dict(
    vocab_size=97,
    hidden_size=96,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": SHAPE | {"head_dim": 16},
    "Mistral": SHAPE | {"head_dim": 16, "sliding_window": 8},
    "Qwen2": SHAPE,
    "Qwen3": SHAPE | {"head_dim": 16},
    "Qwen3Moe": SHAPE
    | {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
    },
    "Gemma2": SHAPE | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "Gemma3Text": SHAPE
    | {
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Phi3": SHAPE | {"pad_token_id": 0},
    "GPT2": {
        "vocab_size": 97,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 6,
        "n_positions": 256,
        "n_inner": 96,
    },
    "OPT": {
        "vocab_size": 97,
        "hidden_size": 96,
        "word_embed_proj_dim": 96,
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "max_position_embeddings": 256,
    },
    "GPTNeoX": {key: SHAPE[key] for key in SHAPE if key != "num_key_value_heads"},
    "GptOss": SHAPE
    | {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmo2": SHAPE,
    "Granite": SHAPE
    | {
        "logits_scaling": 4.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
    },
    "Cohere": SHAPE | {"logit_scale": 0.25},
    "SmolLM3": SHAPE | {"no_rope_layer_interval": 2, "pad_token_id": 0},
    "Mixtral": SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "Starcoder2": SHAPE | {"sliding_window": 8},
}
# Those whose scores go through more than SDPA can do.
EAGER = ("Gemma2", "GptOss")
# Decoders that cannot be hooked, and what the refusal says.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Falcon": (
        {"vocab_size": 97, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6},
        "AttentionInterface",
    ),
    "Bloom": (
        {"vocab_size": 97, "hidden_size": 96, "n_layer": 2, "n_head": 6},
        "AttentionInterface",
    ),
    "Mamba": ({"vocab_size": 97, "hidden_size": 96, "num_hidden_layers": 2}, "recurrent state"),
    "T5": (
        {"vocab_size": 97, "d_model": 32, "num_layers": 2, "num_heads": 2, "d_ff": 32},
        "encoder-decoder",
    ),
}

# Families with both full and windowed layers, by a name of their own where the family has another.
HEADS = SHAPE | {"head_dim": 16, "num_hidden_layers": 4}
MIXED: dict[str, dict[str, Any]] = {
    "Gemma2": HEADS | {"sliding_window": 6, "query_pre_attn_scalar": 16},
    "Gemma3Text": HEADS
    | {
        "sliding_window": 6,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "Qwen2": HEADS | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    "Cohere2": HEADS | {"sliding_window": 6},
    "GptOss": HEADS | {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Llama4Text": HEADS
    | {
        "attention_chunk_size": 8,
        "num_local_experts": 2,
        "intermediate_size_mlp": 96,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
    },
}


def tiny_model(
    family: str,
    implementation: str | None = None,
    seed: int = 0,
    shape: dict[str, Any] | None = None,
) -> Any:
    """Return a random float32 model in evaluation mode, with weights large enough to matter.

    Its attention is SDPA where that reproduces the family's, else eager.
    """
    implementation = implementation or ("eager" if family in EAGER else "sdpa")
    config = getattr(transformers, f"{family}Config")(
        **(shape or FAMILIES[family]), attn_implementation=implementation
    )
    config.eos_token_id = None
    config.bos_token_id = None
    config.pad_token_id = 0
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def refused_model(family: str) -> Any:
    """Return a random model of a family that cannot be steered."""
    config = getattr(transformers, f"{family}Config")(**REFUSED[family][0])
    kind = "Seq2SeqLM" if config.is_encoder_decoder else "CausalLM"
    return getattr(transformers, f"AutoModelFor{kind}").from_config(config).eval()


def _vision_language_models() -> dict[str, Any]:
    towers = dict(depth=2, num_heads=2, patch_size=4)
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    clip = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    tokens = dict(image_token_id=90, vision_start_token_id=92, vision_end_token_id=93)
    return {
        "Llava": dict(
            vision_config=transformers.CLIPVisionConfig(**clip, image_size=16, patch_size=8),
            text_config=transformers.LlamaConfig(**FAMILIES["Llama"]),
            image_token_index=90,
            image_seq_length=4,
            vision_feature_layer=-1,
        ),
        "Qwen2VL": dict(
            vision_config=dict(**towers, embed_dim=32, hidden_size=96, mlp_ratio=2),
            text_config=FAMILIES["Llama"] | {"rope_parameters": rotary},
            **tokens,
            video_token_id=91,
        ),
        "Qwen3VL": dict(
            vision_config=dict(
                **towers,
                hidden_size=32,
                out_hidden_size=96,
                intermediate_size=32,
                deepstack_visual_indexes=[0],
            ),
            text_config=FAMILIES["Llama"] | {"rope_parameters": rotary},
            **tokens,
            video_token_id=91,
        ),
    }


def tiny_vision_language_model(family: str) -> Any:
    """Return a random vision-language model, as `tiny_model` does."""
    config = getattr(transformers, f"{family}Config")(**_vision_language_models()[family])
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def eager_twin(model: Any) -> Any:
    """Return a copy of a model, the same weights, with transformers' eager attention."""
    config = type(model.config).from_dict(model.config.to_dict(), attn_implementation="eager")
    twin = type(model)(config).eval()
    twin.load_state_dict(model.state_dict())
    twin.to(model.dtype)
    twin.generation_config = model.generation_config
    return twin


def prompts(lengths: list[int], anchored: list[list[int]], seed: int = 1) -> dict[str, Tensor]:
    """Return left-padded random prompts with anchors at the given positions of each prompt."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    anchors = torch.zeros_like(ids, dtype=torch.bool)
    for row, (length, places) in enumerate(zip(lengths, anchored, strict=True)):
        start = longest - length
        ids[row, start:] = torch.randint(1, 97, (length,), generator=generator)
        mask[row, start:] = 1
        anchors[row, [start + place for place in places]] = True
    return {"input_ids": ids, "attention_mask": mask, "anchors": anchors}


def extended(mask: Tensor, length: int, value: int | bool) -> Tensor:
    """Return a [B, P] mask continued to `length` columns with a constant."""
    tail = torch.full((mask.shape[0], length - mask.shape[1]), value, dtype=mask.dtype)
    return torch.cat([mask, tail], dim=1)


@torch.no_grad()
def hidden_logits(model: Any, ids: Tensor, mask: Tensor, anchors: Tensor) -> Tensor:
    """Return the last position's logits without the anchors: an uncached pass, positions kept."""
    seen = extended(mask, ids.shape[1], 1)
    hidden = seen * ~extended(anchors, ids.shape[1], False)
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    return model(ids, attention_mask=hidden, position_ids=positions).logits[:, -1].float()


@torch.no_grad()
def full_logits(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the last position's logits of an unsteered, uncached pass."""
    nothing = torch.zeros_like(mask, dtype=torch.bool)
    return hidden_logits(model, ids, mask, nothing)


@torch.no_grad()
def biased_logits(
    twin: Any,
    ids: Tensor,
    mask: Tensor,
    anchors: Tensor,
    bias: dict[int, Tensor],
    first_query: int = 0,
) -> Tensor:
    """Return the last position's logits of eager attention with a bias added to its float mask.

    Args:
        twin: the model with eager attention.
        bias: float [heads] for every layer that is steered.
        first_query: queries before this position are not steered.
    """
    seen = extended(mask, ids.shape[1], 1)
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    keys = extended(anchors, ids.shape[1], False).float()
    steered = (torch.arange(ids.shape[1]) >= first_query).float()
    handles = []
    for module in twin.modules():
        layer = getattr(module, "layer_idx", None)
        if not type(module).__name__.endswith(("Attention", "MLA")) or layer not in bias:
            continue
        grid = keys[:, None, None, :] * steered[None, None, :, None]
        added = bias[layer][None, :, None, None] * grid

        def add(module: Any, args: Any, kwargs: Any, added: Tensor = added) -> Any:
            if kwargs.get("attention_mask") is None:
                return (args[0], *args[1:-1], args[-1] + added), kwargs
            return args, kwargs | {"attention_mask": kwargs["attention_mask"] + added}

        handles.append(module.register_forward_pre_hook(add, with_kwargs=True))
    try:
        out = twin(ids, attention_mask=seen, position_ids=positions)
    finally:
        for handle in handles:
            handle.remove()
    return out.logits[:, -1].float()


class LosslessLayer(QuantizedLayer):
    """A quantised layer that rounds nothing, so that only its mechanics are tested."""

    def __init__(self) -> None:
        super().__init__(residual_length=4)

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor.to(torch.float64)

    def _dequantize(self, tensor: Tensor) -> Tensor:
        return tensor.to(torch.float32)


class LosslessQuantizedCache(QuantizedCache):
    """A quantised cache of such layers."""

    def __init__(self, config: Any) -> None:
        layers = [LosslessLayer() for _ in range(config.num_hidden_layers)]
        Cache.__init__(self, layers=layers)


def babbler(vocabulary: int, positions: int) -> Any:
    """A random Llama with a real tokenizer's vocabulary: it babbles, but fast.

    Args:
        vocabulary: size of the vocabulary.
        positions: the longest sequence.
    """
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model
