"""Recompute the blocks of a model in backward, whatever model it is: `activation_checkpointing.blocks`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from launcher.activation.checkpointing import checkpoint
from launcher.base.errors import EngineError
from launcher.sharding.grouping import block_of

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # without a forward of their own
_NAMES = ("activation_checkpointing", "gradient_checkpointing")  # transformers 5 has a new name for it


def recompute_blocks(model: nn.Module) -> None:
    """Have every block of a model recomputed in backward.

    A model of transformers does it itself, as its own switch says; one that does so already is left alone. Of others
    the blocks are the modules in lists, the same as the engine's units; what a block is called with is kept, as the
    section of the config says. A block in eval mode is not recomputed. To be called once the classes of modules are
    final. Raises: EngineError for a model without blocks.
    """
    if recomputes(model):
        return
    switches = list(_with_switches(model))
    for module in switches:
        name = next(name for name in _NAMES if callable(getattr(module, f"{name}_enable", None)))
        # The other variant of torch's calls autograd within autograd, and loses what keyword arguments carry.
        getattr(module, f"{name}_enable")(**{f"{name}_kwargs": {"use_reentrant": False}})
    if switches:
        return
    blocks = _blocks(model)
    if not blocks:
        raise EngineError(
            f"activation_checkpointing.blocks: {type(model).__name__} has no blocks, modules in an nn.ModuleList or"
            " nn.Sequential",
            hint="call launcher.checkpointing.checkpoint(function, *args) in its forward, and remove the key",
        )
    for block in blocks:
        block.forward = functools.partial(_recomputed, block, block.forward)


def keep_activations(model: nn.Module) -> None:
    """Undo what `recompute_blocks` has done for an engine before: the config of the next one may say otherwise."""
    for module in model.modules():
        own = module.__dict__.get("forward")
        if isinstance(own, functools.partial) and own.func is _recomputed:
            inner = own.args[1]
            del module.forward
            if getattr(inner, "__func__", None) is not type(module).forward:  # it was an attribute of the module, too
                module.forward = inner


def recomputes(model: nn.Module) -> bool:
    """Whether a model of transformers, or a part of one, recomputes by its own switch already."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def finds_blocks(model: nn.Module) -> bool:
    """Whether `recompute_blocks` has something to recompute."""
    return any(True for _ in _with_switches(model)) or bool(_blocks(model))


def _recomputed(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (module.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(functools.partial(forward, **kwargs), *args)


def _with_switches(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that recompute their layers by a switch of their own."""
    if getattr(model, "supports_gradient_checkpointing", False) is True:
        yield model
        return
    for child in model.children():
        yield from _with_switches(child)


def _blocks(model: nn.Module) -> list[nn.Module]:
    names = dict.fromkeys(block_of(name) for name, _ in model.named_parameters())
    found = [model.get_submodule(name) for name in names if name]
    return [block for module in found for block in _with_forward(module)]


def _with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module, or those in it where it is a mere container."""
    if not isinstance(module, _CONTAINERS):
        yield module
        return
    for child in module.children():
        yield from _with_forward(child)
