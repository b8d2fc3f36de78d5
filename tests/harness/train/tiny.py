"""Tiny models of the families in transformers: a shrunk default configuration, inputs, and a loss.

A rule for each kind of number in a configuration makes it small; `OVERRIDES` lists the exceptions.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, NUM_HEADS, LENGTH, SAMPLES = 99, 32, 4, 12, 2
IMAGE_SIZE, PATCH_SIZE, NUM_PATCHES_A_SIDE, NUM_SAMPLES_OF_SOUND = 32, 8, 4, 4000

# (pattern of a name, value for an integer of that name). The first that fits counts.
_RULES: tuple[tuple[str, int], ...] = (
    (r"num_feat_extract_layers", 99),
    (r".*codebook_size|.*bins", 64),
    (r"(.*_)?vocab_size.*|vq_.*_embeddings", VOCABULARY),
    (r"(num_|n_)?(.*_)?(hidden_|encoder_|decoder_|attention_)*(layers?|blocks?)(_count)?|depth|.*_depth|n_layers?", 2),
    (r"num_(key_value|kv)_heads|n_kv_heads?|.*key_value_heads|num_heads_kv", 2),
    (r"n_groups|mamba_n_groups", 2),
    (r"(num_|n_)?(.*_)?(attention_|decoder_|encoder_|attn_)*heads?|n_heads?", NUM_HEADS),
    (r".*head_dim|d_kv|.*_head_size|head_size|d_head", WIDTH // NUM_HEADS),
    (r".*lora_rank", 16),
    (r"(.*_)?(intermediate_size|ffn_dim|d_ff|ffn_hidden_size|ffn_size|inner_dim|mlp_dim|d_inner)(_mlp)?", 2 * WIDTH),
    (
        r"(.*_)?(hidden_size|hidden_dim|d_model|n_embd|embed_dim|emb_dim|embedding_size|embed_size|dim|width|lru_width"
        r"|projection_dim|d_embed|hidden_channels|embedding_dim|neck_hidden_size|proj_size|feature_size)",
        WIDTH,
    ),
    (r"(num_|n_)(local_|routed_)?experts|moe_num_experts|num_local_experts", 4),
    (r"num_experts_per_tok|top_k|moe_k|num_selected_experts|moe_topk|num_experts_per_token", 2),
    (r"(image|img|input)_size", IMAGE_SIZE),
    (r"patch_size", PATCH_SIZE),
    (
        r"max_(position_embeddings|source_positions|target_positions)|n_positions|max_seq_len|n_ctx|seq_length"
        r"|.*max_sequence_length|max_seq_length",
        64,
    ),
    (r"(num_)?(.*_)?queries|num_query_tokens|num_latents", 8),
    (r"num_mel_bins|n_mels|num_mels", 16),
    (r"num_frames|frames_per_clip", 4),
    (r"expert_capacity|mamba_d_head|mamba_head_?dim", 16),
    (r"window_size", 4),
    (r"rotary_dim", 8),
)
_KEPT = re.compile(r".*_(token_id|index|id)|transformers_version|(torch_)?dtype")
# What a configuration works out from its other values.
_LEFT_OUT = re.compile(
    "transformers_version|id2label|label2id|per_layer_config|stage_names|_?out_(indices|features)|dtype|architectures"
)


def _small(name: str, value: int) -> int:
    for pattern, small in _RULES:
        if re.fullmatch(pattern, name):
            return min(value, small)
    return value


def _small_list(name: str, values: list[Any], num_layers: int | None) -> list[Any]:
    if name == "mrope_section":
        return [1, 1, 2]
    if values and len(values) == num_layers and not re.search("depth|size|head|dim|width|channel", name):
        kinds = list(dict.fromkeys(map(repr, values)))  # one for each layer
        return [values[[repr(value) for value in values].index(kind)] for kind in (kinds * 2)[: max(2, len(kinds))]]
    if not values or not all(type(value) is int for value in values):
        return values
    if re.fullmatch(r".*depths?|.*layers?|num_blocks|.*_blocks", name):
        return [min(value, 1) for value in values]
    if re.fullmatch(r".*(hidden_sizes|embed_dims?|widths|channels|hidden_dims?|dims?)", name):
        return [min(value, 16 * (index + 1)) for index, value in enumerate(values)]
    if re.fullmatch(r"(image|img|input)_size", name):
        return [min(value, IMAGE_SIZE) for value in values]
    if re.fullmatch(r"num_(attention_)?heads", name):
        return [min(value, 2) for value in values]
    return values


def shrunk(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's values with small sizes, no dropout, and token ids within the vocabulary."""
    out: dict[str, Any] = {}
    num_ids = 0
    num_layers = values.get("num_hidden_layers") or values.get("num_layers") or values.get("n_layer")
    for name, value in values.items():
        if not isinstance(name, str):
            return dict(values)
        if _LEFT_OUT.fullmatch(name):
            continue
        if isinstance(value, Mapping):
            out[name] = shrunk(value)
        elif isinstance(value, float) and re.search("drop|mask_time_prob|mask_feature_prob|stochastic", name):
            out[name] = 0.0
        elif type(value) is int and re.fullmatch(r".*token_(id|index)", name):
            num_ids += 1
            out[name] = value if value < 3 else VOCABULARY - num_ids
        elif type(value) is int and not _KEPT.fullmatch(name):
            out[name] = _small(name, value)
        elif isinstance(value, list | tuple):
            out[name] = _small_list(name, list(value), num_layers)
        else:
            out[name] = value
    if isinstance(out.get("layer_types"), list):
        for name in ("num_hidden_layers", "num_layers"):
            if name in out:
                out[name] = len(out["layer_types"])
    if any("kv_lora_rank" in name for name in out) and "num_key_value_heads" in out:
        out["num_key_value_heads"] = out["num_attention_heads"]
    for name in ("apply_spec_augment", "use_cache"):
        if name in out:
            out[name] = False
    return out


# Model type -> values in the place of the shrunk ones.
_ROPE_OF_IMAGES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
OVERRIDES: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64},
    "audio-spectrogram-transformer": {"max_length": 64, "patch_size": 8},
    "wav2vec2-bert": {"vocab_size": 99},
    "wav2vec2-conformer": {"vocab_size": 99},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    "reformer": {"is_decoder": True, "axial_pos_shape": [4, 16], "axial_pos_embds_dim": [16, 16]},
    "xlnet": {"d_head": 8},
    "nemotron": {"num_key_value_heads": 2},
    "esm": {"vocab_size": 33},
    "xmod": {"default_language": "en_XX"},
    "qwen2_vl_text": {"rope_parameters": _ROPE_OF_IMAGES},
    "qwen2_5_vl_text": {"rope_parameters": _ROPE_OF_IMAGES},
    "qwen2_vl": {"text_config": {"rope_parameters": _ROPE_OF_IMAGES}},
    "qwen2_5_vl": {"text_config": {"rope_parameters": _ROPE_OF_IMAGES}},
    "time_series_transformer": {"prediction_length": 4},
    "autoformer": {"prediction_length": 4},
    "informer": {"prediction_length": 4},
    "hunyuan_v1_dense": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "head_dim": 8},
    "hunyuan_v1_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "bit": {"num_groups": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "longcat_flash": {"head_dim": 8, "qk_head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
}

HEADS = (
    ("encoder-decoder", "SEQ_TO_SEQ_CAUSAL_LM"),
    ("audio", "SPEECH_SEQ_2_SEQ"),
    ("encoder", "MASKED_LM"),
    ("multimodal", "IMAGE_TEXT_TO_TEXT"),
    ("decoder", "CAUSAL_LM"),
    ("multimodal", "MULTIMODAL_LM"),
    ("vision", "IMAGE_CLASSIFICATION"),
    ("vision", "SEMANTIC_SEGMENTATION"),
    ("vision", "UNIVERSAL_SEGMENTATION"),
    ("vision", "DEPTH_ESTIMATION"),
    ("vision", "OBJECT_DETECTION"),
    ("vision", "MASK_GENERATION"),
    ("vision", "IMAGE_TO_IMAGE"),
    ("vision", "VIDEO_CLASSIFICATION"),
    ("audio", "CTC"),
    ("audio", "AUDIO_CLASSIFICATION"),
    ("audio", "TEXT_TO_SPECTROGRAM"),
    ("audio", "TEXT_TO_WAVEFORM"),
    ("time series", "TIME_SERIES_PREDICTION"),
    ("", ""),
)


def class_of(model_type: str) -> tuple[str, str]:
    """Return kind and class name of a model of this type, with a head where there is one. Raises: KeyError."""
    from transformers.models.auto import modeling_auto

    for kind, head in HEADS:
        # Not every release of transformers has all of them.
        mapping = getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES" if head else "MODEL_MAPPING_NAMES", {})
        if model_type in mapping:
            name = mapping[model_type]
            return kind, name if isinstance(name, str) else name[0]
    raise KeyError(model_type)


def config_of(model_type: str) -> Any:
    """Return a small configuration."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    values = shrunk(kind().to_dict())
    values.pop("model_type", None)
    config = kind(**_merged(values, OVERRIDES.get(model_type, {})))
    for name in ("pad_token_id", "decoder_start_token_id"):
        if getattr(config, name, None) is None:
            setattr(config, name, 0)
    return config


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(values)
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(out.get(name), dict):
            out[name] = _merged(out[name], value)
        else:
            out[name] = value
    return out


def build(model_type: str) -> nn.Module:
    """Return a model with the same weights on every call. Raises: ValueError for one that is not small."""
    import transformers

    _, name = class_of(model_type)
    kind = getattr(transformers, name)
    config = config_of(model_type)
    with torch.device("meta"):
        numel = 0
        with contextlib.suppress(Exception):
            numel = sum(param.numel() for param in kind(config).parameters())
    if numel > 4_000_000:
        raise ValueError(f"{numel / 1e6:.0f} M parameters")
    torch.manual_seed(7)
    model: nn.Module = kind(config).float()
    return model.train()


# ---- inputs ----


def _find(config: Any, *names: str) -> Any:
    """Return the first value of one of these names, in the configuration or in those inside of it."""
    inner = [value for value in vars(config).values() if hasattr(value, "to_dict")]
    for name in names:
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    for part in inner:
        found = _find(part, *names)
        if found is not None:
            return found
    return None


def _number(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)


_ALWAYS = ("labels", "decoder_input_ids", "pixel_values", "image_grid_thw", "mm_token_type_ids")


class Inputs:
    """Makes a batch for a model, by the names in its forward's signature."""

    def __init__(self, model: Any, kind: str) -> None:
        self.model, self.kind, self.config = model, kind, model.config
        self.names = inspect.signature(model.forward).parameters
        self.main = getattr(model, "main_input_name", "input_ids")
        self.num_image_tokens, self.has_images = 0, True
        self.has_patches = "image_grid_thw" in self.names  # images are lists of patches, each with its rows and columns
        if kind == "multimodal":
            self._find_images()

    def _find_images(self) -> None:
        """Find out how many tokens stand for an image; where no simple image fits, leave it to text alone."""
        if self.has_patches:
            self.num_image_tokens = NUM_PATCHES_A_SIDE**2 // (_find(self.config, "spatial_merge_size") or 1) ** 2
        error = self._error()
        match = re.search(r"features:? (\d+)", error)
        if match:
            for self.num_image_tokens in (int(match[1]) // SAMPLES, int(match[1]) // SAMPLES // WIDTH):
                error = self._error()
                if not error:
                    return
        if error:
            self.num_image_tokens, self.has_images = 0, False

    def _error(self) -> str:
        try:
            with torch.no_grad():
                self.model(**self.make(0))
        except Exception as error:  # noqa: BLE001  # it says what the model wants
            return f"{error}" or "some error"
        return ""

    def make(self, seed: int) -> dict[str, Any]:
        """Return the arguments of one rank's forward in one step."""
        generator = torch.Generator().manual_seed(seed)
        batch: dict[str, Any] = {}
        for name, parameter in self.names.items():
            is_needed = parameter.default is inspect.Parameter.empty and parameter.kind not in (
                inspect.Parameter.VAR_KEYWORD,
                inspect.Parameter.VAR_POSITIONAL,
            )
            maker = getattr(self, f"_{name}", None)
            if (name == self.main or is_needed or name in _ALWAYS) and maker:
                value = maker(generator)
                if value is not None:
                    batch[name] = value
        return batch

    def _ids(self, generator: torch.Generator) -> Tensor:
        size = _find(self.config, "vocab_size") or VOCABULARY
        return torch.randint(3, max(4, min(_number(size), VOCABULARY) - 20), (SAMPLES, LENGTH), generator=generator)

    def _input_ids(self, generator: torch.Generator) -> Tensor:
        ids = self._ids(generator)
        if not self.num_image_tokens:
            return ids
        token = _find(self.config, "image_token_id", "image_token_index")
        return torch.cat([torch.full((SAMPLES, self.num_image_tokens), token), ids], 1)

    def _decoder_input_ids(self, generator: torch.Generator) -> Tensor | None:
        return self._ids(generator) if "labels" not in self.names or self.kind != "encoder-decoder" else None

    def _labels(self, generator: torch.Generator) -> Tensor | None:
        if self.kind in ("decoder", "encoder-decoder", "encoder"):
            return self._ids(generator)
        if type(self.model).__name__.endswith(("ImageClassification", "VideoClassification")):
            return torch.randint(0, self.config.num_labels, (SAMPLES,), generator=generator)
        if type(self.model).__name__.endswith("ForCTC"):
            return torch.randint(3, 20, (SAMPLES, 3), generator=generator)
        return None

    def _attention_mask(self, _generator: torch.Generator) -> Tensor:
        return torch.ones(SAMPLES, LENGTH, dtype=torch.long)

    def _pixel_values(self, generator: torch.Generator) -> Tensor | None:
        if not self.has_images:
            return None
        channels = _number(_find(self.config, "num_channels", "in_channels", "in_chans") or 3)
        if self.has_patches:
            part = getattr(self.config, "vision_config", self.config)
            numel = channels * (_find(part, "temporal_patch_size") or 1) * _number(part.patch_size) ** 2
            return torch.randn(SAMPLES * NUM_PATCHES_A_SIDE**2, numel, generator=generator)
        size = _number(_find(self.config, "image_size", "img_size", "input_size") or 2 * IMAGE_SIZE)
        frames = _find(self.config, "num_frames") if self.kind == "vision" else None
        shape = (SAMPLES, *([frames] if frames else []), channels, size, size)
        return torch.randn(shape, generator=generator)

    def _image_grid_thw(self, _generator: torch.Generator) -> Tensor | None:
        side = NUM_PATCHES_A_SIDE
        return torch.tensor([[1, side, side]] * SAMPLES) if self.has_images else None

    def _mm_token_type_ids(self, _generator: torch.Generator) -> Tensor | None:
        if not self.has_images or not self.num_image_tokens:
            return None
        return torch.tensor([[1] * self.num_image_tokens + [0] * LENGTH] * SAMPLES)

    def _pixel_values_videos(self, generator: torch.Generator) -> Tensor:
        size = _number(_find(self.config, "image_size", "crop_size") or IMAGE_SIZE)
        return torch.randn((SAMPLES, 4, 3, size, size), generator=generator)

    def _input_values(self, generator: torch.Generator) -> Tensor:
        if "Spectrogram" in type(self.config).__name__ or type(self.config).__name__ == "ASTConfig":
            return torch.randn((SAMPLES, self.config.max_length, self.config.num_mel_bins), generator=generator)
        return torch.randn((SAMPLES, NUM_SAMPLES_OF_SOUND), generator=generator)

    def _input_features(self, generator: torch.Generator) -> Tensor:
        mels = _number(_find(self.config, "num_mel_bins", "input_feat_per_channel", "feature_size") or 80)
        positions = _find(self.config, "max_source_positions")
        if hasattr(self.config, "max_source_positions") and "Whisper" in type(self.model).__name__:
            return torch.randn((SAMPLES, mels, 2 * positions), generator=generator)
        return torch.randn((SAMPLES, 64, mels), generator=generator)

    def _past_values(self, generator: torch.Generator) -> Tensor:
        length = _number(_find(self.config, "context_length") or 32)
        channels = _number(_find(self.config, "num_input_channels") or 1)
        return torch.randn((SAMPLES, length, channels), generator=generator)


def loss_of(output: Any) -> Tensor:
    """Return the loss of a model's output: its own, or a bounded sum of what it returns."""
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.requires_grad:
        return own.mean()
    terms = []
    for tensor in _floats(output):
        weights = torch.arange(tensor.numel(), dtype=torch.float32).cos().view(tensor.shape)
        terms.append((torch.tanh(tensor.float()) * weights).mean())
    return torch.stack(terms).sum()


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.requires_grad and value.numel():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _floats(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _floats(item)


def paths(model: nn.Module) -> list[str]:
    """Return the names of all modules."""
    return [name for name, _ in model.named_modules()]
