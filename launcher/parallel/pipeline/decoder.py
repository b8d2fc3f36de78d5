"""An unmodified model of blocks, a decoder of Hugging Face above all, as stages.

The model's own forward runs on every stage, with the whole micro-batch; `placeholders.py` says how it gets from the
received hidden states to those that are sent. While a stage runs, the modules of its layers are in their places and
placeholders in all others. Between runs the modules of all own stages are in place, so
names and parameters are those of the rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.parallel.pipeline.decoder_plan import Part, plan_decoder, without_cache
from launcher.parallel.pipeline.placeholders import (
    EarlierBlock,
    EarlierPart,
    LaterBlock,
    Placeholder,
    StageEnd,
    StageRun,
    hold,
)
from launcher.parallel.pipeline.stages import StagedModel, StageLayers, find_tied
from launcher.parallel.pipeline.weights import LayerFacts
from launcher.sharding.pipeline import partition

# What tensor parallelism asks a model of transformers: its plan, and which embeddings share the vocabulary.
_OF_HUGGING_FACE = ("tp_plan", "base_model_prefix", "get_input_embeddings", "get_output_embeddings")


class StagedDecoder(StagedModel):
    """A model that is divided between its blocks.

    Its layers are its blocks: what runs before them goes with the first, and what runs behind them with the last. The
    micro-batch is what the model is called with: a mapping of keyword arguments, a tuple of positional ones, or one
    tensor. The loss is the model's own: `outputs.loss`, `outputs["loss"]`, `outputs[0]`, or what it returns.
    """

    _model: nn.Module

    def __init__(self, model: nn.Module) -> None:
        """model: whole; its modules become those of this one, by the same names. Raises: EngineError."""
        super().__init__()
        self._plan = plan_decoder(model)
        object.__setattr__(self, "_model", model)  # no module of this one: names would begin with it
        for table in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[table] = model.__dict__[table]
        self.config = getattr(model, "config", None)
        for name in _OF_HUGGING_FACE:
            if hasattr(model, name):
                self.__dict__[name] = getattr(model, name)
        self.training = model.training
        self.whole_names = frozenset(name for name, _ in model.named_parameters())
        self._run = StageRun()
        self._others: dict[int, list[tuple[dict[str, Any], str, nn.Module]]] = {}  # by stage: what is not as at rest

    # ---- division ----

    def layer_facts(self) -> list[LayerFacts]:
        """Return what a partition goes by, of each layer."""
        return [self._facts_of(layer) for layer in range(len(self._plan.blocks))]

    def prepare(self, num_stages: int, weights: Sequence[float]) -> None:
        """Divide the blocks into stages of about the same weight each; nothing is freed. All ranks must do the same.

        Raises: ConfigError for fewer layers than stages.
        """
        self.num_stages = num_stages
        names = {id(param): name for name, param in self._model.named_parameters()}
        stages, held = [], []
        for layers in partition(weights, num_stages):
            params = {id(p): p for index in layers for module in self._modules_of(index) for p in module.parameters()}
            num_params = sum(param.numel() for param in params.values())
            stages.append(StageLayers(layers, tuple(map(self._layer_name, layers)), num_params))
            held.append([names[key] for key in params])
        self.stages, self.tied = tuple(stages), find_tied(held)

    def assign(self, own_stages: Sequence[int]) -> None:
        """Keep the blocks of these stages, and what runs before or behind them where it is theirs; free the others."""
        own = self.check_own(own_stages)
        at_rest = {place: self._at(place, own) for place in self._places()}
        for stage in own:
            here = {place: self._at(place, (stage,)) for place in at_rest}
            self._others[stage] = [
                (*self._entry(place), module)
                for place, module in here.items()
                if not (module is at_rest[place] or _are_alike(module, at_rest[place]))
            ]
        canonical = dict(self._model.named_parameters())
        kept = {id(param) for module in at_rest.values() for param in module.parameters()}
        for place, module in at_rest.items():
            entry, key = self._entry(place)
            entry[key] = module
            for name, param in canonical.items():
                if isinstance(module, Placeholder) and name.startswith(f"{place}.") and id(param) in kept:
                    hold(module, name.removeprefix(f"{place}."), param)  # tied to a parameter of an own stage
        self.own_stages = own

    # ---- forward ----

    def needs_batch(self, stage: int) -> bool:
        """Every stage reads the micro-batch: masks and positions come from it."""
        return True

    def run_stage(self, stage: int, received: tuple[Tensor, ...], micro_batch: Any) -> Any:
        """Run the model's forward from the first block of an own stage to the last. See StagedModel."""
        self.check_is_own(stage)
        args, kwargs = _arguments(micro_batch)
        if kwargs.get("use_cache"):
            raise EngineError("use_cache is not possible on pipeline stages", hint="leave it out of the micro-batch")
        with self._arranged(stage, received), without_cache(self._model):
            try:
                outputs = self._model.forward(*args, **kwargs)  # not called: a hook would take its end for a failure
            except StageEnd as end:
                return (end.hidden,)
        if stage < self.num_stages - 1:
            raise EngineError(
                f"the forward ended on stage {stage} before it reached block {self.stages[stage].layers.stop}",
                hint="a model must run all of its blocks on every micro-batch",
            )
        return outputs

    def loss(self, outputs: Any, micro_batch: Any) -> Tensor:
        """Return the model's own loss."""
        loss = outputs
        if not isinstance(outputs, Tensor):
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
            if loss is None and isinstance(outputs, tuple | list) and outputs:
                loss = outputs[0]
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise EngineError(
                f"{type(self._model).__name__} returned no scalar loss",
                hint='put what it computes its loss from into the micro-batch, such as "labels"',
            )
        return loss.reshape(())

    def train(self, mode: bool = True) -> StagedDecoder:
        """Set the mode of this model, and of the one that it was made of."""
        super().train(mode)
        self._model.training = mode
        return self

    @contextlib.contextmanager
    def _arranged(self, stage: int, received: tuple[Tensor, ...]) -> Iterator[None]:
        """Within the block the places of the model hold what this stage needs in them."""
        kept = [(entry, key, entry[key]) for entry, key, _ in self._others[stage]]
        for entry, key, module in self._others[stage]:
            entry[key] = module
        self._run.received = received[0] if received else None
        try:
            yield
        finally:
            self._run.received = None
            for entry, key, module in kept:
                entry[key] = module

    # ---- places ----

    def _places(self) -> list[str]:
        """Return the names of all parts and blocks, in the order of layers."""
        return [*self._plan.names(before=True), *self._plan.blocks, *self._plan.names(before=False)]

    def _layer_of(self, place: str) -> int:
        part = self._part(place)
        if part is not None:
            return 0 if part.is_before else len(self._plan.blocks) - 1
        return self._plan.blocks.index(place)

    def _part(self, place: str) -> Part | None:
        return next((part for part in self._plan.parts if part.name == place), None)

    def _entry(self, place: str) -> tuple[dict[str, Any], str]:
        parent, _, key = place.rpartition(".")
        return self._model.get_submodule(parent)._modules, key

    def _modules_of(self, layer: int) -> list[nn.Module]:
        return [self._model.get_submodule(place) for place in self._places() if self._layer_of(place) == layer]

    def _facts_of(self, layer: int) -> LayerFacts:
        modules = self._modules_of(layer)
        params = {id(param): param for module in modules for param in module.parameters()}.values()
        return LayerFacts(
            class_names=tuple(type(module).__name__ for module in modules),
            num_params=sum(param.numel() for param in params),
            num_trained=sum(param.numel() for param in params if param.requires_grad),
        )

    def _layer_name(self, layer: int) -> str:
        return " + ".join(place for place in self._places() if self._layer_of(place) == layer)

    def _at(self, place: str, stages: Sequence[int]) -> nn.Module:
        """Return what is in a place while one of these stages runs, or at rest for all of a rank's."""
        module, layer = self._model.get_submodule(place), self._layer_of(place)
        if any(layer in self.stages[stage].layers for stage in stages):
            return module
        part = self._part(place)
        if part is not None:
            return Placeholder(module) if part.output is None else EarlierPart(module, self._run, part.output)
        if layer < self.stages[stages[0]].layers.start:
            return EarlierBlock(module, self._run, self._plan.tuple_size)
        return LaterBlock(module)


def _arguments(micro_batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(micro_batch, Mapping):
        return (), dict(micro_batch)
    return (tuple(micro_batch) if isinstance(micro_batch, tuple | list) else (micro_batch,)), {}


def _are_alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules are placeholders of one kind, so that either can replace the other."""
    return isinstance(one, Placeholder) and type(one) is type(other)
