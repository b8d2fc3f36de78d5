"""Split what would break the bound on unsharded parameters, before an optimizer is planned over the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from launcher.base.log import get_logger
from launcher.comm.groups import RankGroup
from launcher.config.policies import ZeroPolicy
from launcher.zero.tiling import LargeLayer, tile_large_layers

MIN_TILE_NUMEL = 2**18  # gathering fewer at a time costs more than it saves
Tiles = Mapping[nn.Parameter, tuple[nn.Parameter, ...]]


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
    found = tile_large_layers(model, max(bound, MIN_TILE_NUMEL), max(bound // 2, MIN_TILE_NUMEL))
    if group.rank == 0:
        for layer in found:
            get_logger().info("%s", _text(layer, bound))
    tiles = {layer.param: layer.tiles for layer in found if layer.tiles}
    if isinstance(optimizer, torch.optim.Optimizer):
        for param_group in optimizer.param_groups:
            param_group["params"] = with_tiles(param_group["params"], tiles)
    return None if model_parameters is None else with_tiles(model_parameters, tiles)


def with_tiles(given: Iterable[Any], tiles: Tiles) -> list[Any]:
    """Return parameters, or groups of them, with tiles in place of the parameters they were cut from."""
    found: list[Any] = []
    for entry in given:
        if isinstance(entry, Mapping):
            params = entry["params"]
            params = [params] if isinstance(params, torch.Tensor) else params
            found.append({**entry, "params": with_tiles(params, tiles)})
        else:
            found += tiles.get(entry, (entry,))
    return found


def _text(layer: LargeLayer, bound: int) -> str:
    why = f"stage3_max_live_parameters is {bound:,}"
    if not layer.tiles:
        return f"note: {layer.name} has {layer.numel:,} elements and stays unsharded ({layer.reason}); {why}"
    return f"tiled: {layer.name}, {layer.numel:,} elements, in {len(layer.tiles)} parts; {why}"
