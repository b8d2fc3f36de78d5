"""What does not fit together: models that no stage can train, and keys about modules the model does not have."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import torch
from torch import nn

from launcher.base.errors import EngineError, did_you_mean
from launcher.base.log import get_logger
from launcher.comm.groups import RankGroup, is_first_rank
from launcher.comm.torch_internals import may_be_compiled, records_cuda_graphs
from launcher.config.schema import DEFAULT_LEAF_CLASSES, Config, LeafModule
from launcher.zero.leaves import mark_leaves
from launcher.zero.parameters import unit_params_of
from launcher.zero.unit import FlatUnit


def check_model(model: nn.Module) -> None:
    """Raise EngineError for a model with modules or parameters that no stage can train."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise EngineError(
                f"{_shown(name)} is a scripted module (torch.jit), whose forward runs no hooks",
                hint="pass the module it was made from; model.compile() makes it faster",
            )
    for name, param in model.named_parameters():
        if param.is_complex():
            raise EngineError(
                f"the parameter {name} is complex, which fp32 and 16-bit training cannot hold",
                hint="keep torch.view_as_real(...) of it as the parameter, and use torch.view_as_complex in forward",
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise EngineError(
                f"{name} is on the meta device: it has no values",
                hint="build the model within launcher.zero.Init(), or load values: model.to_empty(device='cpu') and"
                " model.load_state_dict(...)",
            )


def check_types(model: nn.Module, param_dtype: torch.dtype) -> None:
    """Raise EngineError for a model whose arithmetic fp32 would narrow without a word."""
    for name, param in model.named_parameters():
        if param.requires_grad and param.dtype == torch.float64 and param_dtype == torch.float32:
            raise EngineError(
                f"the parameter {name} is float64, and the engine trains in fp32 or 16 bits",
                hint="call model.float() before initialize(), and give it float32 inputs",
            )


def check_for_ranks(model: nn.Module, world_size: int) -> None:
    """Raise EngineError for a model that would become another one on each of several ranks."""
    for name, module in model.named_modules() if world_size > 1 else ():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise EngineError(
                f"{_shown(name)} has max_norm={module.max_norm}, which changes rows of the weight in forward: each rank"
                " would change those that its own data use",
                hint="leave max_norm out, and shorten the rows of all ranks alike after engine.step()",
            )


def _leaves_not_found(model: nn.Module, section: LeafModule) -> list[str]:
    """Return a sentence for each entry of `leaf_module` that fits no module of the model."""
    names = [name for name, _ in model.named_modules() if name]
    kinds = {type(module) for module in model.modules()}
    classes = {kind.__name__ for kind in kinds} | {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
    ends = {name.rpartition(".")[2] for name in names}
    wanted = (
        [("classes", entry, entry in classes, classes) for entry in section.classes]
        + [("names", entry, entry in names, names) for entry in section.names]
        + [("name_suffixes", entry, any(n.endswith(entry) for n in names), ends) for entry in section.name_suffixes]
    )
    return [
        f'leaf_module.{key}: the model has no "{entry}"; {did_you_mean(entry, choices) or "it has no effect"}'
        for key, entry, is_there, choices in wanted
        if not is_there and entry not in DEFAULT_LEAF_CLASSES
    ]


def mark_leaf_modules(model: nn.Module, settings: Config, group: RankGroup) -> None:
    """Mark the modules that the config names as leaves; rank 0 warns of entries that fit none."""
    leaves = settings.zero_optimization.leaf_module
    if group.rank == 0 and settings.zero_optimization.stage == 3:
        for sentence in _leaves_not_found(model, leaves):
            get_logger().warning("%s", sentence)
    mark_leaves(model, leaves.classes, leaves.names, leaves.name_suffixes)


_warned: WeakSet[nn.Module] = WeakSet()  # of the CUDA graphs of these


def warn_of_cuda_graphs(model: nn.Module, units: Sequence[FlatUnit]) -> None:
    """Say on the first rank that CUDA graphs of a compiled module are recorded again and again at stage 3; once."""
    if not (is_first_rank() and may_be_compiled() and any(unit.is_sharded for unit in units)):
        return
    modules = {name: module for name, module in model.named_modules() if records_cuda_graphs(module)}
    found = [name for name, module in modules.items() if module not in _warned]
    _warned.update(modules.values())
    if found:
        get_logger().warning(
            "torch.compile of %s is to record CUDA graphs, which keep the addresses of parameters: at stage 3 these may"
            " have others in every pass, and each graph is recorded anew. Compile in the default mode, or"
            ' "max-autotune-no-cudagraphs", or use stage 2',
            found[0] or "the model",
        )


class ModelFacts:
    """What `initialize()` relied on. Changed afterwards, parameters would go untrained, or apart from their units."""

    def __init__(self, model: nn.Module, units: Sequence[FlatUnit]) -> None:
        self._model: nn.Module | None = model  # until it was looked at for what was compiled after `initialize()`
        self._units = units
        self._dtypes = [(name, param, param.dtype) for name, param in model.named_parameters()]
        self._frozen = [(name, param) for name, param, _ in self._dtypes if not param.requires_grad]
        self._known = {param for _, param, _ in self._dtypes}
        # Compared by identity in every step: a module that is put into another one leaves no other trace.
        self._children = [(name, module, tuple(module._modules.values())) for name, module in model.named_modules()]

    def check(self) -> None:
        """Raise EngineError for a parameter that was unfrozen, cast, or came with a module that was added."""
        if self._model is not None:
            warn_of_cuda_graphs(self._model, self._units)
            self._model = None
        for index, (name, module, children) in enumerate(self._children):
            if tuple(module._modules.values()) != children:
                self._check_children(name, module)
                self._children[index] = (name, module, tuple(module._modules.values()))
        for name, param in self._frozen:
            if param.requires_grad:
                raise EngineError(
                    f"the parameter {name} was unfrozen after initialize(), which would not train it",
                    hint="unfreeze it before, and give it a learning rate of 0 as long as it is to stay",
                )
        for name, param, dtype in self._dtypes:
            unit_params = unit_params_of(param)
            if param.dtype != dtype and (unit_params is None or param.dtype != unit_params.dtype):
                raise EngineError(
                    f"the parameter {name} became {param.dtype} after initialize(), which made it {dtype}",
                    hint='set "fp16" or "bf16" in the config in place of model.half() or model.to(dtype)',
                )

    def _check_children(self, parent: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            params = child.named_parameters()
            new = next((own for own, param in params if param.requires_grad and param not in self._known), None)
            if new is not None:
                path = f"{parent}.{name}" if parent else name
                raise EngineError(
                    f"the module {path} was added or replaced after initialize(), which would not train its"
                    f" parameter {path}.{new}",
                    hint="change the model before initialize(), or call initialize() anew; at stage 3 change it within"
                    " launcher.zero.GatheredParameters",
                )


def _shown(name: str) -> str:
    return f"the module {name}" if name else "the model"
