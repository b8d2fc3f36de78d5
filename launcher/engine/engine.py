"""The engine users hold: forward, backward, step. It decides when; the rooms below do the work."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineAssertionError, EngineError
from launcher.base.log import get_logger
from launcher.base.progress import BETWEEN_STEPS, EVALUATING, TRAINING, phase, update_progress
from launcher.checkpoint.formats.source import RunState
from launcher.checkpoint_files.place import place_of
from launcher.comm.torch_internals import is_profiler_open
from launcher.config.equations import BatchPlan
from launcher.engine.backward import BackwardPass, ScriptsPass, check_loss, scaled_up, unscaled_error
from launcher.engine.checkpoint_folder import CheckpointFolder
from launcher.engine.checkpoints import Checkpoints, LoadOptions
from launcher.engine.data import continue_loader
from launcher.engine.facts import follow_micro_batch
from launcher.engine.last_step import LastStep
from launcher.engine.model_check import ModelFacts
from launcher.engine.optimizer import ZeroOptimizer
from launcher.engine.parallel import LayerRanks
from launcher.engine.parts import EngineParts
from launcher.engine.watch import StepFacts, Watch
from launcher.engine.weights import WholeWeights
from launcher.optim.schedules import ScheduleStep
from launcher.zero.parameters import find_shared_counts
from launcher.zero.step import step_units

_ENGINE, _OPTIMIZER, _DROPPED = "engine.step()", "optimizer.step()", "engine.zero_grad()"
_INTERRUPTED = "an exception ended a backward pass"


class Engine(nn.Module):
    """A model that trains by `loss = engine(x); engine.backward(loss); engine.step()`.

    All three must be called by every rank, once per micro-batch; `step()` acts only at the accumulation
    boundary. `loss.backward()` of what was computed from `engine(x)` does what `engine.backward(loss)` does, but where
    there is a loss scale. Attributes the engine does not have are the wrapped model's.
    """

    def __init__(self, model: nn.Module, parts: EngineParts) -> None:
        super().__init__()
        self.module = model
        self._parts = parts
        self._sharded = parts.sharded
        self.optimizer = parts.sharded.optimizer
        self.lr_scheduler = parts.lr_scheduler  # a script may set another, or None: then it steps its own
        self.training_dataloader: Any = parts.loader  # of a pipeline, whatever loader the script sets
        self.device = parts.group.device
        self.global_rank = parts.mesh.world.rank
        self.world_size = parts.mesh.world.world_size
        self.global_steps = 0  # optimizer steps taken or skipped
        self.global_samples = 0
        self.micro_steps = 0
        self._batch = self._next_batch = parts.batch
        self._boundary_override: bool | None = None
        self._num_summed = 0  # micro-batches since the last optimizer step that `step()` has ended
        self._has_divided = False  # a loss since then was divided by the accumulation steps
        self._num_backwards = 0  # since the last optimizer step
        self._num_drops = 0  # calls of `zero_grad()` since then that dropped such micro-batches
        self._is_in_no_sync = False
        self._layer_ranks = LayerRanks(parts.mesh.tensor)
        self._backward_done = False  # a backward of this micro-step has run
        self._ended_by: str | None = None  # the call that has ended the last micro-step: see `step_of_optimizer`
        self._ended_accumulation = False  # the last `step()` was at a boundary
        self._last_step = LastStep(parts.sharded.units, self.optimizer, parts.mesh)
        self._losses: list[Tensor] = []  # of this accumulation, to be shown
        self._watch = Watch(model, parts)
        self._model_facts = ModelFacts(model, parts.sharded.units)
        find_shared_counts(unit.params for unit in parts.sharded.units)
        for unit in parts.sharded.units:
            unit.params.after_load()  # building the engine has listed them
        self._pass = BackwardPass(parts.sharded.reducer, parts.sharded.schedule, self._watch)
        # Attributes of a model by public names would be hidden by those of an engine: hence the underscores.
        self._weights = WholeWeights(parts)
        self._folder = CheckpointFolder(parts)
        self._checkpoints = Checkpoints(self, parts, self._folder.after_commit)
        self.client_state: dict[str, Any] = {}  # what the engine's own saves keep of the script

    # ---- facts ----

    @property
    def config(self) -> dict[str, Any]:
        """The config as it was given, as plain data."""
        return self._parts.raw_config

    def train_batch_size(self) -> int:
        """Return the samples of one optimizer step over all ranks."""
        self._note_exception()
        return self._batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of one micro-batch of one rank. Who asks is taken to make its batches of that size."""
        self._note_exception()
        follow_micro_batch()
        return self._batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of one optimizer step."""
        self._note_exception()
        return self._batch.accumulation_steps

    @property
    def dp_world_size(self) -> int:
        """The number of ranks with different samples."""
        return self._parts.mesh.sizes.data

    def zero_optimization_stage(self) -> int:
        """Return the configured ZeRO stage."""
        return int(self._parts.settings.zero_optimization.stage)

    def get_global_grad_norm(self) -> float | None:
        """Return the last step's gradient norm before clipping: inf for a skipped step, None before the first.

        On a GPU it waits for it.
        """
        return self._last_step.norm

    @property
    def skipped_steps(self) -> int:
        """The optimizer steps that updated nothing, because a norm was not finite. On a GPU it waits for the last."""
        return self._last_step.num_skipped

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group; NaN for one of an optimizer that has none."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [float(group.get("lr", math.nan)) for group in groups]

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last one before the optimizer step."""
        self._note_exception()
        if self._parts.policy.reduction.at_step_only:
            return True
        if self._boundary_override is not None:
            return self._boundary_override
        return self._num_summed + 1 >= self.gradient_accumulation_steps()

    @property
    def complete_micro_steps(self) -> int:
        """The micro-steps so far without those of an accumulation under way, which no checkpoint has."""
        return self.micro_steps - self._num_summed

    def _set_batch(self, batch: BatchPlan) -> None:
        self._note_exception()
        self._next_batch = batch
        if not self._has_divided:
            self._begin_sum()

    def _begin_sum(self) -> None:
        """Begin an accumulation: no micro-batch is summed, and the sizes are those that were set last."""
        self._num_summed, self._has_divided, self._backward_done, self._num_backwards = 0, False, False, 0
        if self._batch is not self._next_batch:
            self._batch = self._next_batch
            self._watch.count_samples(self._batch.train_batch_size)

    def _begin_sum_anew(self, why: str) -> None:
        """Begin again with an accumulation whose gradients were dropped, and warn where micro-batches were in it."""
        if self._num_summed and self.global_rank == 0:
            get_logger().warning(
                "%s: the gradients of %d micro-batches before it, which were summed for the next step, are dropped, and"
                " the accumulation begins anew",
                why,
                self._num_summed,
            )
        self.micro_steps -= self._num_summed
        self._losses.clear()
        self._begin_sum()

    # ---- one micro-batch ----

    def _begin(self) -> None:
        """Clean up after an exception. Raises: EngineError for an engine that has ended, or has no parameters now."""
        if self._sharded.has_ended:
            raise EngineError(
                "this engine has ended: destroy() was called, or initialize() again on its model",
                hint="use the engine that the last initialize() returned; before a second train() of a Trainer, set"
                " trainer.model_wrapped = trainer.model",
            )
        self._sharded.offloaded.check_forward()
        if self._pass.recover():
            self._begin_sum_anew(_INTERRUPTED)

    def _note_exception(self) -> None:
        """Count anew after an exception in backward, where that was not done. The next call cleans up."""
        if self._pass.note_exception():
            self._begin_sum_anew(_INTERRUPTED)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; its parameters are waited for unit by unit."""
        self._begin()
        casting = self._parts.casting
        inputs, kwargs = casting.inputs(inputs), casting.inputs(kwargs)
        self._layer_ranks.check_inputs((inputs, kwargs))
        if not self.training:
            with casting.context():
                outputs = self.module(*inputs, **kwargs)
        else:
            self._tell_phase(trains=torch.is_grad_enabled())
            self._watch.throughput.start()
            self._watch.note_inputs(inputs, kwargs)
            with self._parts.sequence.checked((inputs, kwargs)), self._watch.phase("forward"), casting.context():
                outputs = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled() and self.optimizer is not None:
            self._pass.hook_outputs(outputs, (inputs, kwargs), self._begin_backward_of_script)
        return outputs

    def train(self, mode: bool = True) -> Engine:
        """See `nn.Module.train`; the panel of `launch` shows what an engine is set to."""
        self._tell_phase(trains=mode)
        return super().train(mode)

    def _tell_phase(self, *, trains: bool) -> None:
        update_progress(phase=TRAINING if trains and self.optimizer is not None else EVALUATING)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute gradients of `loss` and start reducing them. Every rank must call it.

        loss: scalar, the mean over this rank's micro-batch. With `scale_wrt_gas` it is divided by the
        accumulation steps, so that the step sees the mean over the whole batch. Returns the loss used.
        Raises: EngineError for a loss that is not a scalar or has no graph.
        """
        loss_scale = self._begin_backward(loss)
        if scale_wrt_gas and self.gradient_accumulation_steps() > 1:
            loss = loss / self.gradient_accumulation_steps()
        with self._pass.running(is_boundary=self._reduces_at_boundary()):
            scaled_up(loss, loss_scale).backward(retain_graph=retain_graph)
        self._backward_done = True
        return loss

    def _begin_backward(self, loss: Tensor) -> float:
        """Note the loss of a micro-batch that is about to go back; return the loss scale. Raises: EngineError."""
        optimizer = self._trained()
        check_loss(loss)
        self._begin()
        self._last_step.report()
        self._losses.append(loss.detach())
        self._has_divided = True
        self._num_backwards += 1
        return optimizer.loss_scale

    def _begin_backward_of_script(self, value: Tensor | None) -> ScriptsPass:
        """Note a backward that the script has begun, at an output with this value. Raises: EngineError."""
        optimizer = self._trained()
        if optimizer.loss_scaler is not None:
            raise unscaled_error()
        self._begin()
        self._last_step.report()
        if value is not None:
            self._losses.append(value)
        self._backward_done = self._has_divided = True
        self._num_backwards += 1
        return ScriptsPass(self._reduces_at_boundary(), 1.0 / self.gradient_accumulation_steps())

    def _reduces_at_boundary(self) -> bool:
        """Whether the backward pass about to run is known to be the last one before a step."""
        is_open = self._is_in_no_sync or self._parts.policy.reduction.at_step_only
        return self.is_gradient_accumulation_boundary() and not is_open

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End the micro-batch; at the boundary take the optimizer step. Every rank must call it.

        lr_kwargs: arguments of the schedule's `step()`, at the boundary. Does nothing right after an
        `optimizer.step()`, which has done it. Raises: EngineError when no backward has run since the last call, unless
        the user has set `param.grad`, within `no_sync()`, and for arguments that the schedule does not take.
        """
        self._begin()
        if self._is_in_no_sync:
            raise EngineAssertionError("engine.step() was called within no_sync()", hint="call it after the block")
        if not self._backward_done:
            if self._ended_by == _OPTIMIZER:
                self._ended_by = None
                return
            is_alone = self.world_size == 1 and self._num_summed == 0 and self._reduces_at_boundary()
            self._pass.take_set_gradients(self.module.parameters(), may_count=is_alone)
        schedule = ScheduleStep(self.lr_scheduler, lr_kwargs or {}, self.train_batch_size())
        schedule.check()
        update_progress(beats=1)
        self._sharded.reducer.withdraw()
        boundary = self.is_gradient_accumulation_boundary()
        if boundary:
            self._model_facts.check()
            self._folder.begin_step()
            with self._watch.phase("step"):
                self._take_step(schedule)
        # Not before: after an error the micro-batch has not ended, and `step()` may be called again.
        self._backward_done, self._ended_accumulation, self._ended_by = False, boundary, _ENGINE
        self.micro_steps += 1
        self._num_summed += 1
        self._watch.throughput.stop(boundary)
        if boundary:
            update_progress(step=self.global_steps, phase=BETWEEN_STEPS)  # heartbeats count micro-batches
            self._report()
            self._begin_sum()
            self._num_drops = 0
            self._folder.after_step(self)
            if is_profiler_open():  # one that stops while gloo transfers corrupts its memory: see `StepTracer`
                self._sharded.wait_for_parameters()
            self._watch.trace(self.global_steps)

    def step_of_optimizer(self) -> None:
        """Do what `optimizer.step()` is to do: call `step()`, unless that was called after the last backward.

        Frameworks call either, or both in any order: two different calls after one backward are one step, and a third
        one is an error. Right after a `zero_grad()` that has dropped gradients it updates nothing, as in torch.
        """
        if self._ended_by in (_ENGINE, _DROPPED) and not self._backward_done:
            self._ended_by = None
            return
        # `step()` may follow an `optimizer.step()` and does nothing then; a second `optimizer.step()` is not that call.
        ended_by, self._ended_by = self._ended_by, None
        try:
            self.step()
            ended_by = _OPTIMIZER
        finally:
            self._ended_by = ended_by

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has run since the last `step()`."""
        return self._backward_done

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients gathered since the last step: the accumulation begins anew. `step()` does it by itself.

        Raises: EngineError where it drops micro-batches that `step()` has ended again and again: no step would come.
        """
        self._begin()
        is_between = self._num_summed > 0 and not self._backward_done
        if is_between and self._num_drops:
            raise EngineError(
                "engine.zero_grad() was called between the micro-batches of an accumulation again, and dropped their"
                f" gradients: an optimizer step needs {self.gradient_accumulation_steps()} in a row",
                hint="leave it out: engine.step() drops gradients after each optimizer step",
            )
        self._sharded.offloaded.check_training()
        self._num_drops += is_between
        if self._backward_done:
            self._ended_by = _DROPPED
        self._sharded.reducer.discard()
        self._begin_sum_anew("engine.zero_grad() was called within an accumulation")

    def _take_step(self, schedule: ScheduleStep) -> None:
        parts, sharded, optimizer = self._parts, self._sharded, self._trained()
        scale, delayed = None if optimizer.loss_scaler is None else optimizer.loss_scale, sharded.delayed
        check = self._layer_ranks.check_gradients
        outcome = step_units(
            sharded.units, sharded.reducer, optimizer.flat, parts.policy, parts.mesh, scale, delayed, check
        )
        self._backward_done = False  # its gradients are used up, whatever follows raises
        sharded.schedule.after_step()
        self.global_steps += 1
        if parts.policy.reduction.at_step_only:  # the script decides how many micro-batches a step has
            self.global_samples += self._num_backwards * self._batch.micro_batch_size * self.dp_world_size
        else:
            self.global_samples += self.train_batch_size()
        self._last_step.begin(self.global_steps, outcome, self._losses, schedule)

    def _trained(self) -> ZeroOptimizer:
        """Return the optimizer. Raises: EngineError when there is none, or its states are not on the device."""
        if self.optimizer is None:
            raise EngineAssertionError(
                "this engine has no optimizer: it is for inference only",
                hint='add an "optimizer" section to the config, or call initialize(optimizer=...)',
            )
        self._sharded.offloaded.check_training()
        return self.optimizer

    def _report(self) -> None:
        losses, self._losses = self._losses, []
        last, lr = self._last_step, self.get_lr()[0]
        facts = StepFacts(self.global_steps, self.global_samples, losses, lr, last.loss_scale, last.outcome)
        self._watch.after_step(facts, lambda: last.norm)

    # ---- its weights and checkpoints ----

    def synchronize_parameters(self) -> None:
        """Wait until every parameter holds the last step's update; `state_dict()` and forward do it themselves.

        With `delayed_update` neither does: they see the update before the last, until this or the next `step()`. Then
        every rank must call it.
        """
        self._sharded.synchronize_parameters()

    def state_dict(self, *args: Any, rank0_only: bool = False, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's state dict in host memory, in plain tensors of its own.

        At stage 3 every rank must call it: units are gathered and copied one after another, so that the device never
        holds the whole model. rank0_only: the other ranks copy nothing and get an empty dictionary. Other arguments are
        those of `nn.Module.state_dict`.
        """
        return self._weights.state_dict(self.module, *args, rank0_only=rank0_only, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights into the model, this rank's own `state_dict`, and have masters and shards follow.

        Every rank must call it, with equal values. At stage 3 units are gathered, loaded and sharded one after another.
        Of a pipeline each rank takes what its stages have of a `state_dict` of the whole model.
        Raises: EngineError for `assign`, and what `nn.Module.load_state_dict` does.
        """
        if assign:
            raise EngineError(
                "load_state_dict(assign=True) would put other parameters in place of those that the engine trains",
                hint="leave assign out, which copies the values, or load before initialize()",
            )
        return self._weights.load(self.module, state_dict, strict=strict)

    @phase("saving a checkpoint")
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything that a run needs to continue to `save_dir/tag`; return True. Every rank must call it.

        tag: by default `global_step{N}`. client_state: values of the script that are saved too: plain data, tensors,
        arrays. save_latest: `load_checkpoint` without a tag loads this one. With "async" in the config's `checkpoint`
        section the training waits for a copy in host memory only; see `wait_for_checkpoint`.

        Until the last file is on the disk, the checkpoint that was there before stays as it is. Raises: CheckpointError
        on every rank where one of them cannot save, or does not call it within a minute after rank 0.
        """
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        with self._watch.saving(f"{save_dir}/{name}"):
            self._checkpoints.save(
                place_of(save_dir),
                name,
                client_state or {},
                saves_latest=save_latest,
                excludes_frozen=exclude_frozen_parameters,
            )
        return True

    @phase("loading a checkpoint")
    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Continue from a checkpoint, of any number of ranks, stage and offload. Every rank must call it.

        tag: by default what `latest` names. Returns the checkpoint's folder and the client state; (None, None)
        where there is no `latest`. custom_load_fn: called as `custom_load_fn(src=weights by name, dst=model)` in place
        of loading the parameters. Raises: CheckpointError on every rank, with the file that is damaged or what does
        not fit.
        """
        loads_optimizer = load_optimizer_states and not load_module_only
        options = LoadOptions(
            load_module_strict, loads_optimizer, load_lr_scheduler_states, load_module_only, custom_load_fn
        )
        return self._checkpoints.load(place_of(load_dir), None if tag is None else str(tag), options)

    @phase("waiting for a checkpoint to be saved")
    def wait_for_checkpoint(self) -> None:
        """Wait until an asynchronous save has ended. Raises: CheckpointError where it has failed."""
        self._checkpoints.wait()

    def begin_in_folder(self) -> None:
        """Load what this start continues from, where the config names a folder: the end of `initialize`."""
        self._folder.begin(self)

    def resume(self, folder: str | os.PathLike[str] | None = None) -> dict[str, Any] | None:
        """Load the newest checkpoint that is good, if this start is to continue. Every rank must call it.

        folder: by default `checkpoint.folder` of the config, whose checkpoint `initialize` has loaded already. Returns
        the client state; None where this start begins anew. Raises: CheckpointError, and EngineError without a folder.
        """
        with self._checkpoints.exact():
            return self._folder.resume(self, None if folder is None else os.fspath(folder))

    def continue_data(self, position: Any) -> None:
        """Have the loader continue at the position that a checkpoint holds; None: it holds none.

        Raises: CheckpointError where it is not that of such a loader.
        """
        continue_loader(self.training_dataloader, position, warns=self.global_rank == 0)

    # ---- the model inside ----

    def destroy(self) -> None:
        """End this engine and give the model back, without hooks. Every rank must call it; once is enough.

        Parameters keep the values of the last step. Those that are sharded at stage 3 stay so: `GatheredParameters` and
        another `initialize()` unshard them. Optimizer states are freed with the last reference to the engine.
        """
        self._checkpoints.end()
        try:
            if not self._sharded.has_ended:
                self._last_step.report()
        finally:
            self._sharded.end()
            self._watch.stop()

    def any_rank(self, condition: bool) -> bool:
        """Whether `condition` holds on any rank. Collective.

        For loops whose length differs between ranks, such as generation at stage 3 (every forward needs all ranks):
        `while engine.any_rank(not done): ...` continues, on finished ranks too, until the last one has finished.
        """
        return self._parts.mesh.any_rank(condition)

    def take_counters(self, state: RunState) -> None:
        """Continue counting where a checkpoint was saved; a sum of gradients that was not finished is not in it."""
        self.global_steps, self.global_samples = state.global_steps, state.global_samples
        self.micro_steps = state.micro_steps
        self._watch.continue_from(state.global_samples)
        self._losses.clear()
        self._begin_sum()
        self._last_step.restart(state.skipped_steps)
        if self._sharded.delayed is not None:
            self._sharded.delayed.restart(state.global_steps - state.skipped_steps)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            model = super().__getattr__("module")
            try:
                return getattr(model, name)
            except AttributeError as error:
                raise AttributeError(
                    f"neither Engine nor the model in it, {type(model).__name__}, has an attribute {name!r}", name=name
                ) from error
