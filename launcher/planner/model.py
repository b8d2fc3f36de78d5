"""What the planner knows of a model: its parameters by name and size, and the shape of its blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property

from launcher.base.errors import UsageError
from launcher.sharding.grouping import block_of, form_units, min_unit_numel

_COUNT = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:e\+?\d{1,2})?)\s*([kmbgt]?)", re.IGNORECASE)
_STEPS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_MAX_COUNT = 10**15
# Names of what Muon leaves to AdamW: what reads or writes tokens, and what is not a matrix.
_BESIDE_MATRICES = re.compile(r"embed|lm_head|\bw[tp]e\b|norm|\bln_|bias$", re.IGNORECASE)
# Names of what tensor-parallel ranks have whole.
_BESIDE_LAYERS = re.compile(r"norm|\bln_|\bwpe\b|position", re.IGNORECASE)
# Names of what ranks of one set of experts have different ones of; shared experts are on every rank.
_EXPERTS = re.compile(r"(?:^|\.)(?:deepspeed_)?experts\.")
_EMBEDDING = re.compile(r"embed|\bw[tp]e\b", re.IGNORECASE)
_TYPICAL_VOCABULARY = 50_257
# Layers, hidden size, heads of models of this many parameters; 125M to 175B from Brown et al. 2020, table 2.1.
_TYPICAL_SHAPES = {
    10**6: (4, 128, 4),
    5 * 10**6: (6, 256, 8),
    25 * 10**6: (8, 512, 8),
    125 * 10**6: (12, 768, 12),
    350 * 10**6: (24, 1024, 16),
    760 * 10**6: (24, 1536, 16),
    1_300 * 10**6: (24, 2048, 16),
    2_700 * 10**6: (32, 2560, 32),
    6_700 * 10**6: (32, 4096, 32),
    13 * 10**9: (40, 5120, 40),
    30 * 10**9: (48, 7168, 56),
    66 * 10**9: (64, 9216, 72),
    175 * 10**9: (96, 12288, 96),
    530 * 10**9: (105, 20480, 128),
    10**12: (128, 25600, 160),
}


@dataclass(frozen=True)
class Parameter:
    """One parameter; tied ones stand here once."""

    name: str
    numel: int
    trainable: bool = True

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to one of several experts, as names tell."""
        return _EXPERTS.search(self.name) is not None


@dataclass(frozen=True)
class TransformerShape:
    """What the activations of a stack of transformer blocks follow from."""

    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int = 0  # 0: no output layer over a vocabulary
    ffn_size: int = 0  # inner width of the feed-forward part; 0: 4 × hidden size
    num_kv_heads: int = 0  # 0: as many as heads
    head_size: int = 0  # 0: hidden size / heads
    is_gated: bool = False  # the feed-forward part has a gate beside its first layer (SwiGLU, GEGLU)
    num_experts: int = 0  # of each mixture; 0: there are none
    num_active_experts: int = 0  # that a token goes to
    max_length: int | None = None  # longest sequence, where the model says it

    @property
    def ffn(self) -> int:
        return self.ffn_size or 4 * self.hidden_size

    @property
    def query_size(self) -> int:
        return self.num_heads * (self.head_size or self.hidden_size // self.num_heads)

    @property
    def key_size(self) -> int:
        return self.query_size * (self.num_kv_heads or self.num_heads) // self.num_heads

    def __str__(self) -> str:
        return f"{self.num_layers} layers, hidden {self.hidden_size:,}, {self.num_heads} heads"


@dataclass(frozen=True)
class ModelFacts:
    """A model as the planner sees it."""

    name: str
    source: str  # how the numbers were found
    params: tuple[Parameter, ...]
    shape: TransformerShape | None = None  # None: activations are not counted
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def num_trainable(self) -> int:
        return sum(param.numel for param in self.params if param.trainable)

    @cached_property
    def num_in_matrices(self) -> int:
        """Trained elements of hidden matrices, as names tell."""
        trained = (param for param in self.params if param.trainable)
        return sum(param.numel for param in trained if not _BESIDE_MATRICES.search(param.name))

    @cached_property
    def num_params(self) -> int:
        """All parameters, frozen ones included."""
        return sum(param.numel for param in self.params)

    @cached_property
    def largest_layer_numel(self) -> int:
        """The most parameters that one module holds itself, as DeepSpeed's estimators count it."""
        layers: dict[str, int] = {}
        for param in self.params:
            layer = param.name.rpartition(".")[0]
            layers[layer] = layers.get(layer, 0) + param.numel
        return max(layers.values(), default=0)

    @cached_property
    def largest_param_numel(self) -> int:
        return max((param.numel for param in self.params if param.trainable), default=0)

    @cached_property
    def largest_embedding_numel(self) -> int:
        """The most elements of an embedding, as names tell."""
        return max((param.numel for param in self.params if _EMBEDDING.search(param.name)), default=0)

    def part_of(self, num_ranks: int) -> ModelFacts:
        """Return what each of so many tensor-parallel ranks has: its part of matrices, and the rest whole."""
        if num_ranks == 1:
            return self
        params = tuple(
            param if _BESIDE_LAYERS.search(param.name) else replace(param, numel=-(-param.numel // num_ranks))
            for param in self.params
        )
        return replace(self, params=params)

    def with_part_of_experts(self, num_ranks: int) -> ModelFacts:
        """Return what each of so many ranks has that have one set of experts together: its experts, and the rest."""
        if num_ranks == 1:
            return self
        params = tuple(
            replace(param, numel=-(-param.numel // num_ranks)) if param.is_expert else param for param in self.params
        )
        return replace(self, params=params)

    def numel_below(self, threshold_numel: int) -> int:
        """Return the elements of all parameters smaller than the threshold: they stay unsharded at stage 3."""
        return sum(param.numel for param in self.params if param.numel < threshold_numel)

    def unit_numels(
        self,
        max_unit_numel: int,
        *,
        shards_params: bool,
        offloads_optimizer: bool = False,
        are_experts_apart: bool = False,
    ) -> list[int]:
        """Return the sizes of the engine's units: each block of a list of modules, and the rest, cut by the bound.

        Small neighbours are joined, depending on the setting. Padding is left out. are_experts_apart: they are in units
        of their own, as where they are sharded over ranks.
        """
        trained = [param for param in self.params if param.trainable]
        numels, blocks = [param.numel for param in trained], [block_of(param.name) for param in trained]
        min_numel = min_unit_numel(shards_params=shards_params, offloads_optimizer=offloads_optimizer)
        kinds = [are_experts_apart and param.is_expert for param in trained]
        units = form_units(numels, blocks, kinds, min_numel=min_numel, max_numel=max_unit_numel)
        return [sum(numels[index] for index in unit) for unit in units]


def parse_count(text: str) -> int | None:
    """Return the number of parameters that `7B`, `350M`, `1.3b` or `6_700_000_000` means; None when it is not a number.

    Raises: UsageError for a number that is not a count of parameters.
    """
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        return None
    count = float(match[1].replace("_", "").replace(",", "")) * _STEPS[match[2].lower()]
    if not 1 <= count <= _MAX_COUNT or count != round(count):
        hint = "a whole number up to 1e15, such as 7B, 350M or 6_700_000_000"
        raise UsageError(f"{text[:50]} is not a number of parameters", hint=hint)
    return round(count)


def typical_shape(num_params: int) -> TransformerShape:
    """Return the shape of the GPT that is nearest in size."""
    nearest = min(_TYPICAL_SHAPES, key=lambda size: max(size / num_params, num_params / size))
    layers, hidden, heads = _TYPICAL_SHAPES[nearest]
    vocabulary = min(_TYPICAL_VOCABULARY, num_params // (3 * hidden))
    return TransformerShape(layers, hidden, heads, vocab_size=vocabulary)


def typical_model(num_params: int, shape: TransformerShape, largest_layer_numel: int | None = None) -> ModelFacts:
    """Spread a number of parameters over a GPT of this shape: an embedding and equal blocks.

    largest_layer_numel: size of the embedding, where it is known.
    """
    embedding = min(largest_layer_numel or shape.vocab_size * shape.hidden_size, num_params)
    params = [Parameter("embedding.weight", embedding)]
    each, rest = divmod(num_params - embedding, shape.num_layers)
    parts = {"qkv": 3, "out": 1, "mlp_in": 4, "mlp_out": 4}  # of the 12 × hidden² elements of a block
    for index in range(shape.num_layers):
        block = each + (index < rest)
        sizes = {name: block * part // 12 for name, part in parts.items()}
        sizes["mlp_out"] += block - sum(sizes.values())
        params += [Parameter(f"blocks.{index}.{name}.weight", numel) for name, numel in sizes.items()]
    present = tuple(param for param in params if param.numel)
    return ModelFacts(f"{num_params:,} parameters", f"a GPT of this size: {shape}", present, shape)
