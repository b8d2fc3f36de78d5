"""What each layer counts when layers are divided into stages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.base.errors import ConfigError

WHERE = "pipeline.partition"
PROFILE = "profile"


@dataclass(frozen=True)
class LayerFacts:
    """What a partition goes by."""

    class_names: tuple[str, ...]  # of the module, or modules, of the layer
    num_params: int  # elements of its parameters
    num_trained: int  # of these, trained ones


def layer_weights(method: str, layers: Sequence[LayerFacts]) -> list[float]:
    """Return what each layer counts by "uniform", "parameters", "best" or "type:REGEX", with DeepSpeed's meanings.

    "parameters", and "best", count trained elements, or all where none is trained; "type:REGEX" layers whose class name
    has a match, in any case. Raises: ConfigError for a method that there is not, or a pattern that fits no layer.
    """
    kind, _, pattern = method.partition(":")
    if kind.lower() == "uniform":
        return [1.0] * len(layers)
    if kind.lower() in ("parameters", "best"):
        has_trained = any(layer.num_trained for layer in layers)
        return [float(layer.num_trained if has_trained else layer.num_params) for layer in layers]
    if kind.lower() != "type":
        raise ConfigError(
            f'there is no partition by "{method}"',
            where=WHERE,
            hint='use "parameters", "uniform", "profile", or "type:" and a pattern for names of classes',
        )
    try:
        found = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f'"{pattern}" is not a regular expression: {error}', where=WHERE) from None
    weights = [float(any(found.search(name) for name in layer.class_names)) for layer in layers]
    if not any(weights):
        names = ", ".join(dict.fromkeys(name for layer in layers for name in layer.class_names))
        raise ConfigError(f'no layer has a class name with "{pattern}" in it', where=WHERE, hint=f"there are {names}")
    return weights
