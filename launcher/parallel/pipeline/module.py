"""`PipelineModule`: a model as a list of layers, each of which takes what the one before returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from launcher.base.errors import EngineError
from launcher.parallel.pipeline.specs import LayerSpec, SeedFunction, TiedLayerSpec, on_meta, seed_all, seeded
from launcher.parallel.pipeline.stages import StagedModel, StageLayers, find_tied
from launcher.parallel.pipeline.topology import ProcessTopology, check_topology
from launcher.parallel.pipeline.weights import LayerFacts
from launcher.sharding.mesh import MeshSizes
from launcher.sharding.pipeline import partition

Layer = LayerSpec | nn.Module | Callable[[Any], Any]
_TIED = "tied_modules"


class PipelineModule(StagedModel):
    """A list of layers that are divided into stages, with DeepSpeed's arguments and names of parameters.

    A layer takes what the one before returns: a tensor, or a tuple of tensors as one argument. The first gets the
    inputs of a micro-batch, which is a pair (inputs, labels). Parameters are named by the position of their layer,
    `3.weight`, or by the key of a tied one, `tied_modules.embed.weight`.

    Until `initialize()` layers of a LayerSpec are on the meta device: they have names, shapes and no values. Then each
    rank builds its own. Their random initial values follow from `torch.manual_seed` before this constructor and from
    the layer's position: they are the same for any number of stages. DeepSpeed's change with it.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: SeedFunction | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
        example_input: Any = None,
    ) -> None:
        """num_stages: pipeline ranks; None: what `topology` or the config says. loss_fn: called with outputs and
        labels; without one the last layer returns the loss.

        seed_layers: seed with `base_seed` + position before a layer is built, and anew before each of its forwards.
        partition_method: "uniform", "parameters", "profile", or "type:REGEX" for the same number of layers whose
        class name has a match. activation_checkpoint_interval: so many layers are recomputed together in backward;
        0: none. activation_checkpoint_func: called with a function and its tensors; None: torch's, not reentrant.
        checkpointable_layers: class names; only layers of these are recomputed. None: all with parameters.
        dynamic_shape: without effect: shapes may always differ between micro-batches. example_input (not DeepSpeed's):
        inputs of a micro-batch, which "profile" times layers with. Raises: EngineError.
        """
        super().__init__()
        self._layers: list[Layer] = list(layers)
        _check_layers(self._layers)
        self.requested_stages = _requested(num_stages, topology)
        self.num_stages = self.requested_stages or 0
        self._topology, self.loss_fn = topology, loss_fn
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.partition_method = partition_method
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func or _torch_checkpoint
        self.checkpointable_layers = checkpointable_layers
        self.example_input = example_input
        self._num_forwards: dict[int, int] = {}  # by stage
        has_specs = any(isinstance(layer, LayerSpec) for layer in self._layers)
        # Drawn once, so that a layer's values depend neither on what else this rank builds nor on the number of stages.
        self._build_seed = int(torch.randint(2**48, ())) if has_specs else 0
        self._register_all()
        self.whole_names = frozenset(name for name, _ in self.named_parameters())

    # ---- division ----

    def layer_facts(self) -> list[LayerFacts]:
        """Return what a partition goes by, of each layer."""
        return [
            LayerFacts(
                (self._class_name(i),), _num_params(self._module_of(i)), _num_params(self._module_of(i), trained=True)
            )
            for i in range(len(self._layers))
        ]

    def prepare(self, num_stages: int, weights: Sequence[float]) -> None:
        """Divide the layers into stages of about the same weight each; nothing is built. All ranks must do the same.

        Raises: ConfigError for fewer layers than stages, EngineError for layers of different stages that share a
        parameter without a TiedLayerSpec.
        """
        self.num_stages = num_stages
        self.stages = tuple(self._stage_of(layers) for layers in partition(weights, num_stages))
        self._check_shared()
        names = {id(param): name for name, param in self.named_parameters()}
        params = [[p for index in stage.layers for p in _params(self._module_of(index))] for stage in self.stages]
        self.tied = find_tied([[names[id(param)] for param in of_stage] for of_stage in params])

    def check_mesh(self, sizes: MeshSizes) -> None:
        """Raise EngineError where what the model was built for is another mesh than the config's."""
        if self.requested_stages not in (None, sizes.pipeline):
            raise EngineError(
                f"the model was built for {self.requested_stages} stages, and the config asks for {sizes.pipeline}",
                where="pipeline.stages",
                hint='remove the key, or set it to "auto"',
            )
        if self._topology is not None:
            check_topology(self._topology, sizes)

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute so many layers together in backward from now on; 0: none. Every rank must call it."""
        self.activation_checkpoint_interval = interval

    def assign(self, own_stages: Sequence[int]) -> None:
        """Build or keep the layers of these stages, and free the others."""
        own = self.check_own(own_stages)
        own_layers = {index for stage in own for index in self.stages[stage].layers}
        own_keys = {layer.key for index in own_layers if isinstance(layer := self._layers[index], TiedLayerSpec)}
        for index, layer in enumerate(self._layers):
            if isinstance(layer, TiedLayerSpec):
                continue
            if index not in own_layers:
                self._modules.pop(str(index), None)
                if isinstance(layer, nn.Module):
                    self._layers[index] = _of_another_rank  # free it
            elif isinstance(layer, LayerSpec):
                self.add_module(str(index), self._built_in_place_of(self._modules[str(index)], index))
        tied: Any = getattr(self, _TIED, {})
        for key in list(tied):
            if key in own_keys:
                tied[key] = self._built_in_place_of(tied[key], self._first_of(key))
            else:
                del tied[key]
        if isinstance(self.loss_fn, nn.Module) and self.num_stages - 1 not in own:
            self.loss_fn = None
        self.own_stages = own

    def _built_in_place_of(self, before: nn.Module | None, index: int) -> nn.Module:
        """Return a module with values. before: the one on the meta device; what a script has frozen of it is frozen."""
        module = self.built(index)
        for name, param in before.named_parameters() if before is not None else ():
            module.get_parameter(name).requires_grad_(param.requires_grad)
        return module

    def built(self, index: int) -> nn.Module:
        """Return a new module of the layer at a position, which has a LayerSpec, with its initial values."""
        spec = self._layers[index]
        assert isinstance(spec, LayerSpec)
        if self.seed_layers:
            with seeded(self.base_seed + index, self.seed_fn):
                return spec.build()
        with seeded(self._build_seed + index):
            return spec.build()

    # ---- forward ----

    def needs_batch(self, stage: int) -> bool:
        """Whether a stage reads the micro-batch: the first does, for its inputs."""
        return stage == 0

    def run_stage(self, stage: int, received: tuple[Tensor, ...], micro_batch: Any) -> Any:
        """Run the layers of one own stage, in groups that are recomputed together. See StagedModel."""
        self.check_is_own(stage)
        x: Any = _of_batch(micro_batch)[0] if stage == 0 else received
        if stage and len(received) == 1:
            x = received[0]
        x = self.run_layers(stage, x)
        return x if stage == self.num_stages - 1 else self._sent(x, self.stages[stage].layers.stop - 1)

    def run_layers(self, stage: int, x: Any) -> Any:
        """Run the layers of one own stage on what the layer before returns; return what the last of them does."""
        number = self._num_forwards[stage] = self._num_forwards.get(stage, 0) + 1
        layers, interval = self.stages[stage].layers, self.activation_checkpoint_interval
        for start in range(layers.start, layers.stop, interval or len(layers)):
            group = range(start, min(start + interval, layers.stop)) if interval else layers
            if interval and torch.is_grad_enabled() and self._is_recomputed(group):
                inputs = x if isinstance(x, tuple) else (x,)
                x = self.activation_checkpoint_func(self._function_of(group, number), *inputs)
            else:
                x = self._function_of(group, number)(x)
        return x

    def loss(self, outputs: Any, micro_batch: Any) -> Tensor:
        """Return `loss_fn(outputs, labels)`, or what the last layer returned."""
        loss = outputs if self.loss_fn is None else self.loss_fn(outputs, _of_batch(micro_batch)[1])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            source = "the last layer" if self.loss_fn is None else "loss_fn"
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise EngineError(
                f"{source} returned {shape} and not a scalar loss",
                where="PipelineModule(loss_fn=...)",
                hint="give a loss_fn(outputs, labels) that returns the mean over the micro-batch",
            )
        return loss.reshape(())

    def layer_functions(self) -> Iterator[Callable[[Any], Any]]:
        """Yield each layer with values, as a function of what the one before returns. Layers of a LayerSpec are built
        for the caller, one at a time, and are not those that `assign` builds."""
        for index, layer in enumerate(self._layers):
            if isinstance(layer, LayerSpec):
                yield _bound(layer.forward_fn if isinstance(layer, TiedLayerSpec) else None, self.built(index))
            else:
                yield self._callable_of(index)

    def _function_of(self, layers: range, number: int) -> Callable[..., Any]:
        """Return what runs some layers. number: of the micro-batch, from which the seed of each layer follows."""

        def run(*inputs: Any) -> Any:
            x = inputs[0] if len(inputs) == 1 else inputs
            for index in layers:
                if self.seed_layers:
                    (self.seed_fn or seed_all)(self.base_seed * (number + 1) + index)
                x = self._callable_of(index)(x)
            return x

        return run

    def _callable_of(self, index: int) -> Callable[[Any], Any]:
        layer, module = self._layers[index], self._module_of(index)
        if isinstance(layer, TiedLayerSpec):
            assert module is not None
            return _bound(layer.forward_fn, module)
        return module if module is not None else layer  # type: ignore[return-value]  # a function then

    def _is_recomputed(self, group: range) -> bool:
        names, modules = self.checkpointable_layers, [self._module_of(index) for index in group]
        if names is not None:
            return all(module is not None and type(module).__name__ in names for module in modules)
        return any(_num_params(module) for module in modules)

    def _sent(self, x: Any, index: int) -> tuple[Tensor, ...]:
        """Return what the last layer of a stage returned, as a tuple of tensors. Raises: EngineError."""
        found = (x,) if isinstance(x, Tensor) else x
        if isinstance(found, tuple) and found and all(isinstance(tensor, Tensor) for tensor in found):
            return found
        parts = ", ".join(type(part).__name__ for part in x) if isinstance(x, tuple) else type(x).__name__
        raise EngineError(
            f"layer {index} ({self._class_name(index)}) returned {parts}, and the next stage receives tensors alone",
            hint="return a tensor or a tuple of tensors, or move the bound between stages with another partition",
        )

    # ---- layers ----

    def _register_all(self) -> None:
        """Register every layer under its name; those of a LayerSpec without values."""
        tied = nn.ModuleDict()
        for layer in self._layers:
            if isinstance(layer, TiedLayerSpec):
                if not tied:
                    self.add_module(_TIED, tied)
                if layer.key not in tied:
                    tied[layer.key] = on_meta(layer)
                _check_tied(layer, tied[layer.key])
        for index, layer in enumerate(self._layers):
            if isinstance(layer, nn.Module):
                self.add_module(str(index), layer)
            elif isinstance(layer, LayerSpec) and not isinstance(layer, TiedLayerSpec):
                self.add_module(str(index), on_meta(layer))

    def _module_of(self, index: int) -> nn.Module | None:
        """Return the module of a layer as it is now; None for a function, or a layer of another rank."""
        layer = self._layers[index]
        if isinstance(layer, TiedLayerSpec):
            return getattr(self, _TIED)._modules.get(layer.key)  # type: ignore[no-any-return]
        return self._modules.get(str(index))

    def _first_of(self, key: str) -> int:
        return next(i for i, layer in enumerate(self._layers) if isinstance(layer, TiedLayerSpec) and layer.key == key)

    def _class_name(self, index: int) -> str:
        layer = self._layers[index]
        if isinstance(layer, LayerSpec):
            return layer.typename.__name__
        return (
            type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)
        )

    def _stage_of(self, layers: range) -> StageLayers:
        params = {id(param): param.numel() for index in layers for param in _params(self._module_of(index))}
        return StageLayers(
            layers, tuple(f"{index} {self._class_name(index)}" for index in layers), sum(params.values())
        )

    def _check_shared(self) -> None:
        users: dict[int, int] = {}  # parameter -> the first stage with it
        for stage, found in enumerate(self.stages):
            for index in found.layers:
                if isinstance(self._layers[index], TiedLayerSpec):
                    continue
                for param in _params(self._module_of(index)):
                    if users.setdefault(id(param), stage) != stage:
                        raise EngineError(
                            f"layer {index} ({self._class_name(index)}) shares a parameter with another stage's",
                            where="PipelineModule(layers=...)",
                            hint="give both as TiedLayerSpec with one key",
                        )


def _of_another_rank(_: Any) -> Any:
    raise EngineError("this layer belongs to a stage of another rank")


def _check_layers(layers: Sequence[Any]) -> None:
    for index, layer in enumerate(layers):
        if isinstance(layer, PipelineModule):
            raise EngineError(f"layer {index} is a PipelineModule itself", hint="put its layers into the list")
        if isinstance(layer, type) or not (isinstance(layer, LayerSpec) or callable(layer)):
            raise EngineError(
                f"layer {index}, {layer!r}, is neither a LayerSpec, a module nor a function",
                where="PipelineModule(layers=...)",
                hint="LayerSpec(CLASS, arguments...) describes a layer",
            )
    if not layers:
        raise EngineError("a PipelineModule needs at least one layer", where="PipelineModule(layers=...)")


def _check_tied(spec: TiedLayerSpec, module: nn.Module) -> None:
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    missing = [name for name in spec.tied_weight_attr if name not in names]
    if missing:
        raise EngineError(
            f'{spec!r} of the tied layer "{spec.key}" has no parameter {missing[0]}',
            where="TiedLayerSpec(tied_weight_attr=...)",
            hint=f"its parameters are {', '.join(sorted(names)) or 'none'}",
        )


def _requested(num_stages: int | None, topology: ProcessTopology | None) -> int | None:
    if topology is None:
        if num_stages is not None and num_stages < 1:
            raise EngineError(
                f"num_stages must be at least 1, not {num_stages}", where="PipelineModule(num_stages=...)"
            )
        return num_stages
    found = topology.get_dim("pipe") or 1
    if num_stages not in (None, found):
        raise EngineError(
            f"num_stages {num_stages} contradicts the topology, which has {found} along its pipe axis",
            where="PipelineModule(num_stages=...)",
            hint="give one of them",
        )
    return found


def _of_batch(micro_batch: Any) -> tuple[Any, Any]:
    """Return inputs and labels; lists in them become tuples, as a DataLoader makes lists of tuples."""
    if not isinstance(micro_batch, tuple | list) or len(micro_batch) != 2:
        found = f"{type(micro_batch).__name__}" + (f" of {len(micro_batch)}" if hasattr(micro_batch, "__len__") else "")
        raise EngineError(
            f"a PipelineModule takes micro-batches (inputs, labels), and got a {found}",
            hint="have the dataset or the collate_fn return pairs; either part may be a tuple of tensors",
        )
    inputs, labels = (tuple(part) if isinstance(part, list) else part for part in micro_batch)
    return inputs, labels


def _bound(forward_fn: Callable[[Any, Any], Any] | None, module: nn.Module) -> Callable[[Any], Any]:
    return module if forward_fn is None else lambda x: forward_fn(module, x)


def _torch_checkpoint(function: Callable[..., Any], *inputs: Any) -> Any:
    return checkpoint(function, *inputs, use_reentrant=False)


def _params(module: nn.Module | None) -> list[nn.Parameter]:
    return [] if module is None else list(module.parameters())


def _num_params(module: nn.Module | None, *, trained: bool = False) -> int:
    return sum(param.numel() for param in _params(module) if param.requires_grad or not trained)
