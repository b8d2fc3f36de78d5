"""The engine config that a script gets as an argument, read before any rank starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.base.errors import ConfigError

if TYPE_CHECKING:
    from launcher.cluster.cluster import Placement
    from launcher.config.schema import Config
    from launcher.sharding.mesh import MeshSizes


_SUFFIXES = (".json", ".yaml", ".yml")


class EngineConfig:
    """The config that the script's arguments name; without one, every check passes."""

    def __init__(self, script_args: Sequence[str]) -> None:
        self._source = config_argument(script_args)

    def check(self, placement: Placement, *, is_here: bool = False) -> MeshSizes | None:
        """Check the config as the ranks would; return its mesh, None without a config. Raises: ConfigError.

        is_here: all ranks are on this machine, so that a file which is not here is missing.
        The number of ranks is checked against the mesh and `elasticity`: the script may still change the batch keys.
        """
        config = self._load()
        if config is None:
            if is_here and (self._source or "").endswith(_SUFFIXES):  # other words may mean something to the script
                raise ConfigError(f"config {self._source} does not exist", where=os.getcwd(), hint="check the path")
            return None
        from launcher.config.equations import check_nodes, mesh_sizes

        if config.elasticity.enabled is True:
            self._load(placement.world_size)
        sizes = mesh_sizes(config, placement.world_size)
        nodes = sorted((*placement.nodes, *placement.elsewhere), key=lambda node: node.node_rank)
        check_nodes(config, sizes, [node.num_ranks for node in nodes])
        return sizes

    def world_sizes(self) -> tuple[int, ...] | None:
        """Return the world sizes that the config fits, None when it fits any. Raises: ConfigError."""
        config = self._load()
        if config is None:
            return None
        from launcher.config.elastic import elastic_batch_of

        batch = elastic_batch_of(config)
        return None if batch is None else batch.world_sizes

    def _load(self, world_size: int | None = None) -> Config | None:
        """Load the config; None when there is none, or it is on other hosts only."""
        if self._source is None:
            return None
        from launcher.config.load import is_readable_here, load_config  # pydantic: not for runs without a config

        readable = is_readable_here(self._source)
        return load_config(self._source, world_size=world_size).config if readable else None


def config_argument(script_args: Sequence[str]) -> str | None:
    """Return the config that a script gets: a path, or base64 of JSON; None without one."""
    for position, argument in enumerate(script_args):
        name, has_value, value = argument.partition("=")
        if name not in ("--deepspeed", "--deepspeed_config"):
            continue
        if has_value:
            return value
        following = script_args[position + 1] if position + 1 < len(script_args) else "--"
        if not following.startswith("-"):
            return following
    return None
