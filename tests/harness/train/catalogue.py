"""The families of models that are trained to see whether the engine fits what it does not know."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from harness.train import tiny
from harness.train.no_torchvision import import_timm
from torch import Tensor, nn

Inputs = Callable[[int], dict[str, Any]]  # from a seed to the arguments of a forward


@dataclass(frozen=True)
class Family:
    """A small model of some library, and what it is given."""

    name: str  # such as "transformers/llama"
    build: Callable[[], nn.Module]  # the same weights on every call
    inputs: Callable[[Any], Inputs]  # of a model


def family_of(name: str) -> Family:
    """Return a family by its name, LIBRARY/MODEL. Raises: ImportError where the library is not installed."""
    library, _, model = name.partition("/")
    if library != "timm" and importlib.util.find_spec(library) is None:
        raise ImportError(f"{library} is not installed")
    return _LIBRARIES[library](name, model)


def kind_of(name: str, model: nn.Module) -> str:
    """Return what a table says a family is."""
    library, _, model_type = name.partition("/")
    if library != "transformers":
        return {"timm": "vision", "diffusers": "diffusion", "peft": "adapter"}[library]
    config: Any = model.config
    parts = {part for part in ("text", "vision", "audio", "encoder", "backbone") if hasattr(config, f"{part}_config")}
    kind, _ = tiny.class_of(model_type)
    if "text" in parts and len(parts) > 1:
        kind = "multimodal"
    if any("expert" in part for part, _ in model.named_modules()):
        kind = f"{kind} of experts"
    if any(
        part.endswith(("mamba", "mixer", "ssm", "linear_attn", "rec", "recurrent_block")) for part in tiny.paths(model)
    ):
        kind = f"{kind}, state space"
    return kind or {"pixel_values": "vision", "past_values": "time series"}.get(model.main_input_name, "encoder")


# ---- transformers ----


def _of_transformers(name: str, model_type: str) -> Family:
    kind, _ = tiny.class_of(model_type)
    return Family(name, lambda: tiny.build(model_type), lambda model: tiny.Inputs(model, kind).make)


# ---- timm ----

_IMAGES = {
    "resnet10t": {},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32)},
    "convnextv2_atto": {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32)},
    "vit_tiny_patch16_224": {"img_size": 64, "embed_dim": 48, "depth": 2},
    "deit_tiny_patch16_224": {"img_size": 64, "embed_dim": 48, "depth": 2},
    "swin_tiny_patch4_window7_224": {
        "img_size": 64, "window_size": 4, "embed_dim": 32, "depths": (1, 1), "num_heads": (2, 2)
    },
    "efficientnet_lite0": {},
    "mobilenetv3_small_050": {},
    "regnetx_002": {},
    "edgenext_xx_small": {},
    "repvgg_a0": {},
    "ghostnet_050": {},
}  # fmt: skip


def _of_timm(name: str, model: str) -> Family:
    timm = import_timm()

    def build() -> nn.Module:
        torch.manual_seed(7)
        built: nn.Module = timm.create_model(model, num_classes=10, **_IMAGES[model])
        return built.train()

    def make(seed: int) -> dict[str, Any]:
        return {"x": torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(seed))}

    return Family(name, build, lambda _model: make)


# ---- diffusers ----

# Class -> arguments, shapes of random inputs, other inputs.
_Diffusion = tuple[dict[str, Any], Mapping[str, tuple[int, ...]], Mapping[str, Any]]
_STEPS = {"timestep": torch.tensor([1, 5])}
_SMALL = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
_TRANSFORMER = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4}
_CODER = {
    "block_out_channels": (16, 32), "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 4,
}  # fmt: skip
_CONDITION = {"encoder_hidden_states": (2, 5, 16)}
_LATENTS = {"hidden_states": (2, 4, 8, 8)}
DIFFUSION: dict[str, _Diffusion] = {
    "UNet2DModel": (
        _SMALL
        | {"sample_size": 16, "attention_head_dim": 8, "down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
        | {"up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        {"sample": (2, 3, 16, 16)},
        _STEPS,
    ),
    "UNet2DConditionModel": (
        _SMALL
        | {"sample_size": 8, "cross_attention_dim": 16, "attention_head_dim": 4}
        | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
        | {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        {"sample": (2, 4, 8, 8)} | _CONDITION,
        _STEPS,
    ),
    "ControlNetModel": (
        _SMALL
        | {"cross_attention_dim": 16, "attention_head_dim": 4, "conditioning_embedding_out_channels": (8, 16)}
        | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")},
        {"sample": (2, 4, 8, 8), "controlnet_cond": (2, 3, 16, 16)} | _CONDITION,
        _STEPS,
    ),
    "AutoencoderKL": (_CODER | {"latent_channels": 4}, {"sample": (2, 3, 16, 16)}, {"sample_posterior": True}),
    "VQModel": (_CODER | {"latent_channels": 3, "num_vq_embeddings": 16}, {"sample": (2, 3, 16, 16)}, {}),
    "DiTTransformer2DModel": (
        _TRANSFORMER
        | {"num_layers": 2, "sample_size": 8, "patch_size": 2, "norm_num_groups": 4, "num_embeds_ada_norm": 20},
        _LATENTS,
        _STEPS | {"class_labels": torch.tensor([1, 2])},
    ),
    "PixArtTransformer2DModel": (
        _TRANSFORMER
        | {"num_layers": 2, "sample_size": 8, "patch_size": 2, "norm_num_groups": 4}
        | {"cross_attention_dim": 16, "caption_channels": 16},
        _LATENTS | _CONDITION,
        _STEPS | {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "SD3Transformer2DModel": (
        _TRANSFORMER
        | {"num_layers": 2, "sample_size": 8, "patch_size": 2, "caption_projection_dim": 16, "joint_attention_dim": 16}
        | {"pooled_projection_dim": 16, "out_channels": 4, "pos_embed_max_size": 16},
        _LATENTS | _CONDITION | {"pooled_projections": (2, 16)},
        _STEPS,
    ),
    "FluxTransformer2DModel": (
        {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}
        | {"num_attention_heads": 2, "joint_attention_dim": 16, "pooled_projection_dim": 16}
        | {"axes_dims_rope": (4, 4, 8)},
        {"hidden_states": (2, 16, 4), "pooled_projections": (2, 16)} | _CONDITION,
        {"timestep": torch.tensor([0.1, 0.5]), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3)},
    ),
    "Transformer2DModel": (
        _TRANSFORMER | {"norm_num_groups": 4, "cross_attention_dim": 16}, _LATENTS | _CONDITION, {},
    ),
    "SanaTransformer2DModel": (
        _TRANSFORMER
        | {"out_channels": 4, "num_layers": 2, "num_cross_attention_heads": 2, "cross_attention_head_dim": 8}
        | {"cross_attention_dim": 16, "caption_channels": 16, "sample_size": 8},
        _LATENTS | _CONDITION,
        _STEPS,
    ),
    "WanTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16}
        | {"freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "cross_attn_norm": True},
        {"hidden_states": (2, 4, 2, 8, 8)} | _CONDITION,
        _STEPS,
    ),
}  # fmt: skip


def _of_diffusers(name: str, kind: str) -> Family:
    import diffusers

    arguments, shapes, others = DIFFUSION[kind]

    def build() -> nn.Module:
        torch.manual_seed(7)
        built: nn.Module = getattr(diffusers, kind)(**arguments)
        return built.train()

    def make(seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        made: dict[str, Tensor] = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        return {**made, **others}

    return Family(name, build, lambda _model: make)


# ---- peft ----

_LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
# Name -> model type, class of the adapter's configuration, its arguments.
ADAPTERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "LoRA on llama": ("llama", "LoraConfig", _LORA | {"target_modules": ["q_proj", "v_proj"]}),
    "LoRA on all of llama": ("llama", "LoraConfig", _LORA | {"target_modules": "all-linear"}),
    "LoRA on bert": ("bert", "LoraConfig", _LORA | {"target_modules": ["query", "value"]}),
    "LoRA on gpt2": ("gpt2", "LoraConfig", _LORA | {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "LoRA on t5": ("t5", "LoraConfig", _LORA | {"target_modules": ["q", "v"]}),
    "LoRA on vit": ("vit", "LoraConfig", _LORA | {"target_modules": "all-linear"}),
    "DoRA on llama": ("llama", "LoraConfig", _LORA | {"target_modules": ["q_proj", "v_proj"], "use_dora": True}),
    "LoRA and a trained head on llama": (
        "llama", "LoraConfig", _LORA | {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
    "IA3 on llama": (
        "llama", "IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "prefix tuning of gpt2": ("gpt2", "PrefixTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}),
    "prompt tuning of llama": ("llama", "PromptTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}),
}  # fmt: skip


def _of_peft(name: str, adapter: str) -> Family:
    import peft

    model_type, kind, arguments = ADAPTERS[adapter]

    def build() -> nn.Module:
        model = tiny.build(model_type)
        torch.manual_seed(8)
        adapted: nn.Module = peft.get_peft_model(model, getattr(peft, kind)(**arguments))
        return adapted.train()

    def inputs(model: Any) -> Inputs:
        return tiny.Inputs(model.get_base_model(), tiny.class_of(model_type)[0]).make

    return Family(name, build, inputs)


_LIBRARIES: dict[str, Callable[[str, str], Family]] = {
    "transformers": _of_transformers,
    "timm": _of_timm,
    "diffusers": _of_diffusers,
    "peft": _of_peft,
}
OTHERS = tuple(
    f"{library}/{model}"
    for library, models in (("timm", _IMAGES), ("diffusers", DIFFUSION), ("peft", ADAPTERS))
    for model in models
)
