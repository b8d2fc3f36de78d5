"""The engine of a pipeline: one call a step, in which the micro-batches pass through the stages of all its ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.base.progress import EVALUATING, TRAINING, phase, update_progress
from launcher.comm.torch_internals import tree_map_only
from launcher.engine.backward import scaled_up
from launcher.engine.deepspeed_engine import DeepSpeedEngine
from launcher.engine.parts import EngineParts
from launcher.parallel.pipeline.links import StageTransfers
from launcher.parallel.pipeline.runtime import (
    Action,
    EngineVerbs,
    PipelineRuntime,
    evaluation_actions,
    training_actions,
)
from launcher.parallel.pipeline.stages import StagedModel
from launcher.parallel.pipeline.tied import TiedParameters
from launcher.sharding.pipeline import PipelinePlan

_REDUCTIONS = {"avg", "sum", None}


class PipelineEngine(DeepSpeedEngine):
    """A model in stages that trains by `loss = engine.train_batch(data_iter)`.

    A step takes as many micro-batches as there are gradient accumulation steps; they fill the pipeline. Every rank must
    call each method. All ranks of one pipeline need the same micro-batches; a rank whose stages read none may give no
    iterator.
    """

    def __init__(self, model: StagedModel, parts: EngineParts, plan: PipelinePlan) -> None:
        """plan: of the stages of `model`."""
        super().__init__(model, parts)
        group = parts.mesh.pipeline or parts.mesh.world.alone()
        self._pass.shows_gradients = False  # a step follows each
        self._pipeline = group
        self._staged = model
        self._plan = plan
        verbs = EngineVerbs(
            self._forward_context, self._backward_context, self._scaled, self._take_left, self._last_step.report
        )
        links = StageTransfers(group, plan.rank_of, parts.mesh.links)  # before any transfer: see there
        self._runtime = PipelineRuntime(model, links, plan.rank_of, verbs)
        self._tied = TiedParameters(model, parts.sharded.units, group, plan.rank_of)
        self._tied.copy_from_owner()
        self._actions: dict[tuple[bool, int], list[Action]] = {}  # by whether it trains, and number of micro-batches
        self._iterator: Iterator[Any] | None = None
        self._position: Any = None  # in the data, of a checkpoint that was loaded before there was a loader
        self._batch_function: Callable[[Any], Any] | None = None
        self._reads = any(model.needs_batch(stage) for stage in model.own_stages) or self.is_last_stage()

    # ---- facts, by DeepSpeed's names ----

    def is_first_stage(self) -> bool:
        """Whether this rank has the first stage."""
        return 0 in self._staged.own_stages

    def is_last_stage(self) -> bool:
        """Whether this rank has the last stage, which computes the loss."""
        return self._staged.num_stages - 1 in self._staged.own_stages

    @property
    def num_stages(self) -> int:
        """Ranks of one pipeline."""
        return self._parts.mesh.sizes.pipeline

    @property
    def stage_id(self) -> int:
        """This rank's place in its pipeline."""
        return self._pipeline.rank

    @property
    def idle_fraction(self) -> float:
        """The part of the last step in which this rank did not compute: the bubble, and the time of transfers.

        On a GPU the host waits for the step.
        """
        return self._runtime.stopwatch.idle_fraction

    @property
    def expected_idle_fraction(self) -> float:
        """What the schedule leaves idle where all stages take the same time and transfers none."""
        return self._plan_for(self.gradient_accumulation_steps()).idle_fraction

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step: the gradient accumulation steps."""
        return self.gradient_accumulation_steps()

    def reset_activation_shape(self) -> None:
        """Do nothing: shapes may differ between micro-batches and steps."""

    # ---- data ----

    def set_batch_fn(self, function: Callable[[Any], Any]) -> None:
        """Have `function` turn what a loader or an iterator gives into a micro-batch."""
        self._batch_function = function

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Have `train_batch()` read this loader of micro-batches, again and again.

        One with `state_dict()` and `load_state_dict()` is saved with the engine, and continues where a checkpoint that
        was loaded before says.
        """
        self.training_dataloader, self._iterator = loader, None
        position, self._position = self._position, None
        self.continue_data(position)

    def continue_data(self, position: Any) -> None:
        """See `Engine.continue_data`. A pass that was being read ends; a loader that is set later continues."""
        if position is not None and self.training_dataloader is None:
            self._position = position
            return
        if self.training_dataloader is not None:
            self._iterator = None
        super().continue_data(position)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Have `train_batch()` read this iterator over micro-batches."""
        self.training_dataloader, self._iterator = None, iterator

    def _micro_batches(self, data_iter: Iterator[Any] | None, count: int) -> list[Any] | None:
        """Return micro-batches on the device; fewer where the data has ended, None where this rank reads none."""
        if data_iter is None and self.training_dataloader is not None:
            read = self._next_of_loader
        elif not self._reads:
            return None
        else:
            source = data_iter if data_iter is not None else self._iterator
            if source is None:
                raise EngineError(
                    "train_batch() has no data: no data_iter was given, and initialize() got no training_data",
                    hint="engine.train_batch(data_iter), or initialize(training_data=...)",
                )
            read = functools.partial(next, source, None)
        found = []
        for _ in range(count):
            micro_batch = read()
            if micro_batch is None:
                break
            found.append(micro_batch)
        if not self._reads:
            return None
        device, casting = self.device, self._parts.casting
        if self._batch_function is not None:
            found = list(map(self._batch_function, found))
        # Not blocking: the copy queues behind the update of the last step, which the host would wait for.
        return [
            casting.inputs(tree_map_only(Tensor, lambda leaf: leaf.to(device, non_blocking=True), each))
            for each in found
        ]

    def _next_of_loader(self) -> Any:
        """Return the next micro-batch; None where a new pass gives none, such as a generator that has ended."""
        assert self.training_dataloader is not None
        if self._iterator is not None:
            micro_batch = next(self._iterator, None)
            if micro_batch is not None:
                return micro_batch
        self._iterator = iter(self.training_dataloader)
        return next(self._iterator, None)

    # ---- one step ----

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Take one optimizer step and return the mean loss of all its samples, fp32 [] on the device of every rank.

        data_iter: over micro-batches; None: the loader of `initialize(training_data=...)`, again and again. Raises:
        StopIteration on all ranks where the data of the first stage ends within the step; EngineError.
        """
        self._trained()
        self._begin()
        update_progress(phase=TRAINING)
        self.module.train()
        count = self.gradient_accumulation_steps()
        self._watch.throughput.start()
        micro_batches = self._micro_batches(data_iter, count)
        self._layer_ranks.check_inputs(micro_batches)
        self._runtime.run(self._actions_for(count, trains=True), micro_batches, count, wants_loss=True)
        self._tied.add_gradients()
        # At each step, whether it is printed or not: as with DeepSpeed every rank gets it, and any may read it alone.
        loss = self._mean_loss(self._runtime.losses)
        self._runtime.stopwatch.end()
        self._losses = [loss]
        self._backward_done = True
        self.micro_steps += count - 1 - self._num_summed  # some where an error has ended the last step
        self._num_summed = count - 1
        super().step()
        return loss

    @phase(EVALUATING)
    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run micro-batches forward in evaluation mode, without gradients; the module's mode is as before then.

        Returns the loss: the mean over micro-batches and data-parallel ranks ("avg"), its sum over micro-batches
        ("sum"), or the list of this rank's (None); on ranks without the last stage None unless `bcast_loss`. Without
        `compute_loss`: the list of outputs of the last stage, None elsewhere. With `return_logits`: (loss, outputs).
        num_micro_batches: default: the gradient accumulation steps. Raises: as `train_batch`.
        """
        if reduce_output not in _REDUCTIONS:
            raise EngineError(f"eval_batch(reduce_output={reduce_output!r})", hint='use "avg", "sum" or None')
        count = num_micro_batches or self.gradient_accumulation_steps()
        self._begin()
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                micro_batches = self._micro_batches(data_iter, count)
                actions = self._actions_for(count, trains=False)
                self._runtime.run(actions, micro_batches, count, wants_loss=compute_loss)
        finally:
            self.module.train(was_training)
        outputs = self._runtime.outputs if self.is_last_stage() else None
        if not compute_loss:
            return outputs
        loss = self._evaluated(reduce_output, count, broadcasts=bcast_loss)
        return (loss, outputs) if return_logits else loss

    def _evaluated(self, reduction: str | None, count: int, *, broadcasts: bool) -> Any:
        losses = self._runtime.losses
        if reduction is None:
            return list(losses) if self.is_last_stage() else None
        loss = self._mean_loss(losses)
        if reduction == "sum":
            loss = loss * count
        return loss if broadcasts or self.is_last_stage() else None

    def _mean_loss(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the mean over the micro-batches and data-parallel ranks, on every rank. Collective."""
        own = torch.zeros(2, dtype=torch.float64, device=self.device)
        if losses:
            own[0], own[1] = torch.stack(list(losses)).mean(), 1.0
        total, count = self._parts.mesh.world.communicator.sum_scalars(own).unbind()
        return (total / count).float()

    def _actions_for(self, count: int, *, trains: bool) -> list[Action]:
        if (trains, count) not in self._actions:
            actions_of = training_actions if trains else evaluation_actions
            self._actions[trains, count] = actions_of(self._plan_for(count), self.stage_id)
        return self._actions[trains, count]

    def _plan_for(self, count: int) -> PipelinePlan:
        return replace(self._plan, num_micro_batches=count)

    # ---- what the runtime asks for ----

    @contextlib.contextmanager
    def _forward_context(self) -> Iterator[None]:
        with self._watch.phase("forward"), self._parts.casting.context():
            yield

    def _backward_context(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context of one backward. The last one of a step starts the reductions as it runs."""
        return self._pass.running(is_boundary=is_last and self._reduces_in_backward)

    @property
    def _reduces_in_backward(self) -> bool:
        """Whether the last backward of a step completes the gradients: of all that this rank has, and no other adds."""
        return len(self._staged.own_stages) == 1 and not self._staged.tied

    def _scaled(self, loss: Tensor) -> Tensor:
        return scaled_up(loss / self.gradient_accumulation_steps(), self._trained().loss_scale)

    def _take_left(self) -> None:
        self._sharded.reducer.collect_untracked_grads()

    def _report(self) -> None:
        super()._report()
        if self._watch.prints(self.global_steps):
            get_logger().info(
                "pipeline: rank 0 was idle for %.0f%% of step %d (%s: %.0f%% in theory)",
                100 * self.idle_fraction,
                self.global_steps,
                self._plan.schedule,
                100 * self.expected_idle_fraction,
            )

    # ---- what a pipeline does not have ----

    def forward(self, *inputs: Any, **kwargs: Any) -> NoReturn:
        """Refuse. Raises: EngineError."""
        raise _refused("engine(...)")

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> NoReturn:
        """Refuse. Raises: EngineError."""
        raise _refused("engine.backward()")

    def scale(self, loss: Tensor, scale_wrt_gas: bool = True) -> NoReturn:
        """Refuse. Raises: EngineError."""
        raise _refused("engine.scale()")

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Refuse. Raises: EngineError."""
        raise _refused("engine.step()")

    def no_sync(self) -> NoReturn:
        """Refuse. Raises: EngineError."""
        raise _refused("engine.no_sync()")

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> NoReturn:
        """Refuse. Raises: EngineError."""
        raise _refused("engine.set_gradient_accumulation_boundary()")

    def compile(
        self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, schedule: Any = None
    ) -> NoReturn:
        """Refuse. Raises: EngineError."""
        raise EngineError(
            "engine.compile() cannot be used with pipeline parallelism: stages change places in the model",
            hint="compile the layers before initialize(): layer.compile()",
        )


def _refused(call: str) -> EngineError:
    return EngineError(
        f"{call} cannot be used with pipeline parallelism: a step takes all its micro-batches at once",
        hint="loss = engine.train_batch(data_iter), or engine.eval_batch(data_iter)",
    )
