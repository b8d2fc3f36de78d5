"""What a rank has in the places of modules that run on other stages, so that the model's own forward can run.

The forward of a model runs on each of its stages, from the first line: masks, positions and rotary embeddings come from
the model's own code. Blocks of earlier stages pass on what this stage received, embeddings of the first stage return
zeros of the right shape, which no block sees, and the first block of a later stage ends the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineError

_OF_MODULES = frozenset(vars(nn.Module()))


class StageEnd(Exception):
    """Ends the forward of a stage in front of the first block of a later one."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the end of a stage")
        self.hidden = hidden


@dataclass
class StageRun:
    """The input of the stage that runs, which all placeholders of a model share."""

    received: Tensor | None = None  # [samples, tokens, hidden]


class Placeholder(nn.Module):
    """A module without the parameters of the one in whose place it is, with its plain attributes.

    Forwards of models read these: which attention a block has, the width of an embedding.
    """

    is_placeholder = True  # a parameter that it holds, tied to one of this stage, is read by another module

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name, value in _plain_attributes(original):
            setattr(self, name, value)
        self._of = type(original).__name__

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse. Raises: EngineError."""
        raise EngineError(
            f"the forward of the model reached a {self._of} of another stage",
            hint="divide the model as a PipelineModule, layer by layer",
        )


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what forwards may read of a module: attributes of its classes that are constants, then its own."""
    for kind in reversed(type(module).__mro__[: -len(nn.Module.__mro__)]):
        for name, value in vars(kind).items():
            if not name.startswith("__") and isinstance(value, bool | int | float | str):
                yield name, value
    for name, value in vars(module).items():
        if name not in _OF_MODULES and not _holds_tensors(value):
            yield name, value


def _holds_tensors(value: Any) -> bool:
    """Whether a value keeps memory of a module alive, or may: a function, a patched `forward` above all."""
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(_holds_tensors, value))
    return isinstance(value, Tensor | nn.Module) or (callable(value) and not isinstance(value, type))


class EarlierBlock(Placeholder):
    """Returns what the stage received, in the form that blocks return."""

    def __init__(self, original: nn.Module, run: StageRun, tuple_size: int) -> None:
        """tuple_size: of what a block returns; 0: a tensor."""
        super().__init__(original)
        self._run, self._tuple_size = run, tuple_size

    def forward(self, *_: Any, **__: Any) -> Any:
        assert self._run.received is not None
        return in_form(self._run.received, self._tuple_size)


class LaterBlock(Placeholder):
    """Ends the forward with the hidden states that it is called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: StageEnd."""
        raise StageEnd(hidden_of(args, kwargs))


class EarlierPart(Placeholder):
    """Returns zeros of the shape that an embedding or a projection of the first stage returns.

    Its parameters have the shape, type and device that they have on the first stage and no memory: models ask an
    embedding for these. Their values are not a number, so that a forward that reads them is found out.
    """

    def __init__(self, original: nn.Module, run: StageRun, shape: OutputShape) -> None:
        super().__init__(original)
        self._run, self._shape = run, shape
        self._shapes = {name: param.shape for name, param in original.named_parameters(recurse=False)}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            run, shapes = self.__dict__.get("_run"), self.__dict__.get("_shapes", {})
            if run is None or run.received is None or name not in shapes:
                raise
            return run.received.new_full((), torch.nan).expand(shapes[name])

    def forward(self, *_: Any, **__: Any) -> Tensor:
        assert self._run.received is not None
        return self._run.received.new_zeros(self._shape.of(self._run.received))


@dataclass(frozen=True)
class OutputShape:
    """The shape of what a part returns, from that of the hidden states: a dimension of them, or a constant."""

    dims: tuple[int, ...]
    is_constant: tuple[bool, ...] = field(default=())  # of each: dims has its size, else which dimension it is

    def of(self, hidden: Tensor) -> list[int]:
        """Return the sizes beside these hidden states."""
        pairs = zip(self.dims, self.is_constant, strict=True)
        return [dim if is_constant else hidden.shape[dim] for dim, is_constant in pairs]


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the hidden states among the arguments of a block: its first tensor. Raises: EngineError."""
    for value in (*args, kwargs.get("hidden_states"), *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    raise EngineError("a block was called without a tensor", hint="divide the model as a PipelineModule")


def in_form(hidden: Tensor, tuple_size: int) -> Any:
    """Return hidden states as blocks do: as they are (0), or first in a tuple of this size, before nothing."""
    return hidden if tuple_size == 0 else (hidden, *[None] * (tuple_size - 1))


def hold(placeholder: nn.Module, path: str, param: nn.Parameter) -> None:
    """Register a parameter below a placeholder under a dotted path, which is its name in the whole model."""
    *parents, name = path.split(".")
    module = placeholder
    for parent in parents:
        if parent not in module._modules:
            module.add_module(parent, Placeholder(nn.Identity()))
        inner = module._modules[parent]
        assert inner is not None
        module = inner
    if name in vars(module):
        delattr(module, name)
    module.register_parameter(name, param)
