"""Layers too large to be unsharded at once: their weights in tiles that are fetched one after another.

Memory-centric tiling as in ZeRO-Infinity (Rajbhandari et al. 2021, section 5.1.3).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.base.errors import EngineError, EngineRuntimeError
from launcher.base.log import get_logger
from launcher.comm.groups import RankGroup
from launcher.config.policies import ZeroPolicy
from launcher.optim.factory import replace_parameters
from launcher.sharding.layout import unsharded_numel, unsharded_shape
from launcher.zero.construct import shard_parameter
from launcher.zero.gathered import GatheredParameters
from launcher.zero.leaves import external_parameters, get_z3_leaf_modules, set_tile
from launcher.zero.parameters import unit_params_of

_MIN_TILE_NUMEL = 2**18  # gathering fewer at a time costs more than it saves


def split_evenly(length: int, num_parts: int) -> list[int]:
    """Return the lengths of `num_parts` parts; they differ by one at most."""
    small, num_larger = divmod(length, num_parts)
    return [small + 1] * num_larger + [small] * (num_parts - num_larger)


class TiledLinear(nn.Module):
    """A linear layer as a grid of smaller ones, `linears[output part][input part]`.

    At stage 3 one of them is unsharded at a time.

    Each part of the output is a sum over the parts of the input; its bias is in the tile of the last of them.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **linear_options: Any,
    ) -> None:
        """input_is_already_split: `forward` gets the input's parts, not the input.

        combine_out_splits: `forward` returns the whole output, else the list of its parts. linear_cls: class of the
        tiles, built as `linear_cls(in, out, bias=..., **linear_options)`. init_linear: a layer to take the values of.
        Raises: EngineError for a number of splits that the features do not allow.
        """
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise EngineRuntimeError(
                    f"TiledLinear: {name}_splits is {splits}, {name}_features {features}",
                    hint=f"give 1 to {features} splits",
                )
        self.in_features, self.out_features = in_features, out_features
        self.in_sizes, self.out_sizes = split_evenly(in_features, in_splits), split_evenly(out_features, out_splits)
        # Where the parts begin, and where the last one ends: by DeepSpeed's names.
        self.in_parts, self.out_parts = ([0, *itertools.accumulate(sizes)] for sizes in (self.in_sizes, self.out_sizes))
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.use_bias = bias
        last = in_splits - 1
        self.linears: Any = nn.ModuleList(  # of lists of modules, which no annotation can say
            nn.ModuleList(
                linear_cls(num_in, num_out, bias=bias and index == last, **linear_options)
                for index, num_in in enumerate(self.in_sizes)
            )
            for num_out in self.out_sizes
        )
        for _, _, tile in self._tiles():
            set_tile(tile)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, inputs: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """inputs: [..., in_features], or its parts along the last dimension. Returns [..., out_features], or parts."""
        parts = self.parts_of(inputs)
        outputs: list[Tensor] = []
        for row in self.linears:
            terms = (tile(part) for tile, part in zip(row, parts, strict=True))
            outputs.append(functools.reduce(torch.add, terms))
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    def parts_of(self, inputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of an input of `forward` along the last dimension. Raises: EngineError for other sizes."""
        if not isinstance(inputs, Tensor):
            parts = list(inputs)
        elif self.input_is_already_split:
            raise EngineError("TiledLinear: input_is_already_split, but forward got one tensor", hint="give its parts")
        else:
            parts = list(inputs.split(self.in_sizes, dim=-1))
        if [part.shape[-1] for part in parts] != self.in_sizes:
            raise EngineError(
                f"TiledLinear: the input's parts have {[part.shape[-1] for part in parts]} features",
                hint=f"they must have {self.in_sizes}",
            )
        return parts

    @torch.no_grad()
    def copy_params_from(self, other: Any) -> None:
        """Take over the weight and bias of a linear layer of the same features. Sharded ones: every rank must call it.

        Raises: EngineError for a layer of another form.
        """
        weight, bias = other.weight, getattr(other, "bias", None)
        with GatheredParameters(other.parameters()):
            shape = (self.out_features, self.in_features)
            if tuple(weight.shape) != shape or (bias is not None) != self.use_bias:
                raise EngineError(
                    f"TiledLinear: cannot take over a weight of shape {tuple(weight.shape)}"
                    f" {'without' if bias is None else 'with'} bias",
                    hint=f"the layer must have {shape} and {'a' if self.use_bias else 'no'} bias",
                )
            for row, column, tile in self._tiles():
                rows, columns = _range(self.out_sizes, row), _range(self.in_sizes, column)
                with GatheredParameters(tile.parameters(), modifier_rank=0):
                    tile.weight.copy_(weight[rows, columns])
                    if bias is not None and tile.bias is not None:
                        tile.bias.copy_(bias[rows])

    def _tiles(self) -> Iterator[tuple[int, int, Any]]:
        for row, tiles in enumerate(self.linears):
            for column, tile in enumerate(tiles):
                yield row, column, tile

    def extra_repr(self) -> str:
        """Return what the printed model shows of this layer."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"


def _range(sizes: list[int], index: int) -> slice:
    start = sum(sizes[:index])
    return slice(start, start + sizes[index])


# ---- layers of a model that exists ----


class _LinearTile(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight  # 2-D [some outputs, inputs]

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)


class _EmbeddingTile(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight  # 2-D [rows, some columns]

    def forward(self, index: Tensor, padding_idx: int | None, scale_grad_by_freq: bool) -> Tensor:
        return F.embedding(index, self.weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)


class _Tiled(nn.Module):
    """A layer whose weight is in tiles. Its state dict, and whoever reads `weight`, see one weight."""

    tiles: Any  # nn.ModuleList of `tile_kind`
    tile_sizes: list[int]  # of the tiles along `tile_dim`; asking the tiles themselves would fetch them
    tile_dim: int
    tile_kind: type[nn.Module]

    @property
    def weight(self) -> Tensor:
        """The whole weight: computed, so that its gradient goes to the tiles. No elements where they are released."""
        return _joined([tile.weight for tile in self.tiles], self.tile_dim)


class _TiledLinearLayer(_Tiled, nn.Linear):  # type: ignore[override]  # `weight` is computed
    tile_dim = 0
    tile_kind = _LinearTile

    def forward(self, x: Tensor) -> Tensor:
        biases = [None] * len(self.tiles) if self.bias is None else self.bias.split(self.tile_sizes)
        return torch.cat([tile(x, bias) for tile, bias in zip(self.tiles, biases, strict=True)], dim=-1)


class _TiledEmbeddingLayer(_Tiled, nn.Embedding):  # type: ignore[override]  # `weight` is computed
    tile_dim = 1
    tile_kind = _EmbeddingTile

    def forward(self, index: Tensor) -> Tensor:
        return torch.cat([tile(index, self.padding_idx, self.scale_grad_by_freq) for tile in self.tiles], dim=-1)


_TILED: dict[type[nn.Module], type[_Tiled]] = {nn.Linear: _TiledLinearLayer, nn.Embedding: _TiledEmbeddingLayer}


@dataclass(frozen=True)
class LargeLayer:
    """A parameter that is larger than the bound, and what became of it."""

    name: str
    param: nn.Parameter
    numel: int
    tiles: tuple[nn.Parameter, ...] = ()  # in its place now; none: it stays unsharded
    reason: str = ""  # why it stays unsharded


def tile_large_layers(model: nn.Module, max_numel: int, max_tile_numel: int | None = None) -> list[LargeLayer]:
    """Split the weight of each `nn.Linear` and `nn.Embedding` of more than `max_numel` elements into tiles.

    max_tile_numel: elements of a tile at most, unless a row has more; None: as `max_numel`. State dicts are as before;
    `named_parameters()` has the tiles, as `<layer>.tiles.<index>.weight`. Call it on every rank, before an optimizer
    is built over the parameters. Shared weights, subclasses of the two and parts of leaf modules stay
    unsharded. Returns every parameter above the bound.
    """
    readers: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            readers.setdefault(param, []).append((prefix, module, name))
    found = []
    for param, places in readers.items():
        numel = unsharded_numel(param)
        if numel > max_numel:
            prefix, module, name = places[0]
            full_name = f"{prefix}.{name}" if prefix else name
            reason = _why_untiled(model, param, places)
            tiles = () if reason else _tile(module, param, max_tile_numel or max_numel)
            found.append(LargeLayer(full_name, param, numel, tiles, reason))
    return found


def tile_to_fit(
    model: nn.Module,
    policy: ZeroPolicy,
    group: RankGroup,
    optimizer: Any,
    model_parameters: Iterable[Any] | None,
) -> Iterable[Any] | None:
    """Tile the layers that alone are larger than `stage3_max_live_parameters`; rank 0 says which.

    A tile has at most half of the bound, so that the next one is fetched while one is used. Tiles take the place of
    their parameter in a client's optimizer, and in what is returned: `model_parameters`. Every rank must call it.
    """
    if not policy.stage.shards_parameters:
        return model_parameters
    bound = policy.parameters.max_live_numel
    found = tile_large_layers(model, max(bound, _MIN_TILE_NUMEL), max(bound // 2, _MIN_TILE_NUMEL))
    if group.rank == 0:
        for layer in found:
            get_logger().info("%s", _text(layer, bound))
    tiles = {layer.param: layer.tiles for layer in found if layer.tiles}
    return replace_parameters(optimizer, model_parameters, lambda param: tiles.get(param, (param,)))


def _text(layer: LargeLayer, bound: int) -> str:
    why = f"stage3_max_live_parameters is {bound:,}"
    if not layer.tiles:
        return f"note: {layer.name} has {layer.numel:,} elements and stays unsharded ({layer.reason}); {why}"
    return f"tiled: {layer.name}, {layer.numel:,} elements, in {len(layer.tiles)} parts; {why}"


def is_tiled(module: nn.Module) -> bool:
    """Whether the weight of a layer is in tiles: its state dict is put together and split by hooks of the layer."""
    return isinstance(module, _Tiled)


def _why_untiled(model: nn.Module, param: nn.Parameter, places: list[tuple[str, nn.Module, str]]) -> str:
    """Return why a parameter is not split; "": it is."""
    _, module, name = places[0]
    if len(places) > 1:
        return f"shared with {', '.join('.'.join(filter(None, (prefix, name))) for prefix, _, name in places[1:])}"
    if type(module) not in _TILED or name != "weight":
        return f"{name} of a {type(module).__name__}, no plain Linear or Embedding"
    if any(module is part for leaf in get_z3_leaf_modules(model) for part in leaf.modules()):
        return "within a leaf module"
    if any(param is read for other in model.modules() for read in external_parameters(other)):
        return "read by another module"
    if getattr(module, "max_norm", None) is not None:
        return "its max_norm looks at whole rows"
    return ""


def _tile(module: Any, param: nn.Parameter, max_numel: int) -> tuple[nn.Parameter, ...]:
    kind = _TILED[type(module)]
    length = unsharded_shape(param)[kind.tile_dim]
    most = max(1, max_numel * length // unsharded_numel(param))
    sizes = split_evenly(length, -(-length // most))
    tiles = tuple(_cut(param, sizes, kind.tile_dim))
    del module._parameters["weight"]
    module.__class__ = kind
    module.tile_sizes = sizes
    module.tiles = nn.ModuleList(kind.tile_kind(tile) for tile in tiles)
    for tile in module.tiles:
        set_tile(tile)
    module.register_state_dict_post_hook(_join_in_state)
    module.register_load_state_dict_pre_hook(_split_in_state)
    return tiles


def _cut(param: nn.Parameter, sizes: list[int], dim: int) -> Iterator[nn.Parameter]:
    """Yield the tiles of a weight; of one that `zero.Init` has sharded, sharded too."""
    before = unit_params_of(param)
    with GatheredParameters(param):
        for part in param.detach().split(sizes, dim):
            # Made empty: a parameter that is made of a view shares with the others what autograd counts of writes.
            tile = nn.Parameter(part.new_empty(0), param.requires_grad)
            tile.data = part.clone() if before is not None else part.contiguous()
            if hasattr(param, "use_muon"):
                tile.use_muon = param.use_muon  # type: ignore[attr-defined]  # what users say of it to Muon
            if before is not None:
                shard_parameter(tile, before.group, placement=before.placement)
            yield tile


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if parts[0].dim() <= dim else torch.cat(parts, dim)  # a released one has no rows to speak of


def _keys(module: _Tiled, prefix: str) -> list[str]:
    return [f"{prefix}tiles.{index}.weight" for index in range(len(module.tiles))]


def _join_in_state(module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    state[f"{prefix}weight"] = _joined([state.pop(key) for key in _keys(module, prefix)], module.tile_dim)


def _split_in_state(module: Any, state: dict[str, Any], prefix: str, *others: Any) -> None:
    whole, (*_, errors) = state.pop(f"{prefix}weight", None), others
    if whole is None:
        return
    if whole.dim() != 2 or whole.shape[module.tile_dim] != sum(module.tile_sizes):
        errors.append(f"size mismatch for {prefix}weight: it has shape {tuple(whole.shape)}")
        return
    for key, part in zip(_keys(module, prefix), whole.split(module.tile_sizes, module.tile_dim), strict=True):
        state[key] = part
