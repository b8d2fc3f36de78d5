"""Changes modules of other libraries as they are imported: those in `_CHANGED` of the package, and no others.

accelerate and Lightning train on CPUs then, and transformers initialises weights that are sharded; the arguments of its
Trainer follow LAUNCH_CONFIG_PATCH, and it waits for checkpoints and steps all schedules. The panel of
`launch` shows which modules are being imported, which changes nothing of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from launcher.base import env
from launcher.base.progress import phase
from launcher.compat import collectives


def changed_spec(name: str, path: Any, change: str) -> ModuleSpec | None:
    """Return the spec of a module that is on its package's `path`, with a loader that has it changed.

    change: the function of this file that takes the module once it is loaded.
    """
    spec = PathFinder.find_spec(name, path)
    if spec is not None and isinstance(spec.loader, SourceFileLoader):
        spec.loader = _ChangingLoader(spec.loader, globals()[change])
    return spec


class _ChangingLoader(SourceFileLoader):
    def __init__(self, loader: SourceFileLoader, change: Callable[[ModuleType], None]) -> None:
        super().__init__(loader.name, loader.path)
        self._change = change

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self._change(module)


def shown_spec(spec: ModuleSpec | None) -> ModuleSpec | None:
    """Return the spec of a module with a loader that shows its import on the panel of `launch`.

    After that of torch the rank answers which collectives it has entered.
    """
    if spec is not None and isinstance(spec.loader, SourceFileLoader):
        spec.loader = _ShowingLoader(spec.loader.name, spec.loader.path)
    return spec


class _ShowingLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        with phase(f"importing {self.name}"):
            super().exec_module(module)
            if self.name == "torch":
                if env.JOURNAL_FD.name in os.environ:
                    # A script may have a module of its own by that name, or a torch that is not whole.
                    with contextlib.suppress(ImportError, AttributeError):
                        importlib.import_module("launcher.monitor.plain").install()
                collectives.listen()  # last: its thread imports, and two threads that do get modules that are not whole


def accelerate_on_cpu(module: Any) -> None:
    """Have `PartialState` of the module `accelerate.state` use gloo without an accelerator.

    accelerate chooses a backend of `torch.distributed` only where it finds an accelerator. For DeepSpeed on CPUs it has
    none then, takes itself for a single process, and the Trainer refuses its configuration.
    """
    partial_state = module.PartialState
    prepare_backend = partial_state._prepare_backend

    def with_gloo(self: Any, *arguments: Any, **options: Any) -> tuple[str | None, Any]:
        backend, distributed_type = prepare_backend(self, *arguments, **options)
        is_rank = os.environ.get("LOCAL_RANK", "-1") != "-1"
        if backend is None and is_rank and os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
            backend = "gloo"
        return backend, distributed_type

    partial_state._prepare_backend = with_gloo


def lightning_on_cpu(module: Any) -> None:
    """Have `DeepSpeedStrategy` of a module of Lightning take the CPU, too.

    The strategies of `Trainer` and of `Fabric` refuse every accelerator but CUDA's, and then want the indices of the
    devices to be the local ranks: the CPU has none.
    """
    strategy = module.DeepSpeedStrategy
    set_up, validate = strategy.setup_environment, module._validate_device_index_selection

    @functools.wraps(set_up)
    def set_up_on_cpu(self: Any) -> None:
        if {device.type for device in self.parallel_devices or ()} == {"cpu"}:
            super(strategy, self).setup_environment()
        else:
            set_up(self)

    @functools.wraps(validate)
    def validate_but_cpus(parallel_devices: Any) -> None:
        validate([device for device in parallel_devices if device.type != "cpu"])

    strategy.setup_environment = set_up_on_cpu
    module._validate_device_index_selection = validate_but_cpus


def gather_initial_weights(module: Any) -> None:
    """Have `PreTrainedModel` of the module `transformers.modeling_utils` gather what it initialises.

    transformers 4 initialises modules where only shards are left: a model from a config keeps the values that torch
    gave it, a head that a checkpoint does not have keeps what was in memory, and an embedding with a padding index ends
    in an IndexError. transformers 5 gathers what a checkpoint does not have, and also initialises modules that were
    loaded, whose values it keeps: where that reads a shape, as in a ResNet, it ends in a ValueError.
    """
    from transformers.integrations import deepspeed

    # Then rank 0 alone may initialise, of what is gathered already, and its values are sent by the caller.
    gathers_itself = hasattr(deepspeed, "initialize_weights_zero3")
    pretrained_model = module.PreTrainedModel
    initialize = pretrained_model._initialize_weights

    @functools.wraps(initialize)
    def initialize_gathered(self: Any, part: Any, *arguments: Any) -> None:
        # A model may initialise parameters of the modules in `part`, such as `part.q_proj.weight`.
        inner = [child for child in part.children() if not isinstance(child, pretrained_model)]
        params = [param for owner in (part, *inner) for param in owner.parameters(recurse=False)]
        sharded = [param for param in params if _is_sharded(param)]
        if sharded and _are_initialized((*params, *part.buffers(recurse=False))):
            part._is_hf_initialized = True
        if getattr(part, "_is_hf_initialized", False) or not sharded:
            initialize(self, part, *arguments)
            return
        zero = importlib.import_module("deepspeed.runtime.zero")  # ours, and seldom needed
        with zero.GatheredParameters(sharded, modifier_rank=None if gathers_itself else 0):
            initialize(self, part, *arguments)

    pretrained_model._initialize_weights = initialize_gathered


def _is_sharded(param: Any) -> bool:
    status = getattr(param, "ds_status", None)
    return status is not None and status.name == "NOT_AVAILABLE"


def _are_initialized(values: Iterable[Any]) -> bool:
    return all(getattr(value, "_is_hf_initialized", False) for value in values)


def change_trainer(module: Any) -> None:
    """Have the Trainer of the module `transformers.trainer` wait for saves, and step schedules that need a metric.

    It looks into the folder of the best checkpoint, or of that to continue from, before it asks the engine to load, and
    removes folders at the end of the training: an asynchronous save may still write there. It asks where checkpoints
    are before it does the latter, and before each save, which waits for the one before anyway. A single checkpoint that
    is kept replaces the one before only once it is there.

    accelerate wraps the schedule of an optimizer of the config, and leaves its steps to the engine, which has no
    metric: a Trainer finds one that it steps when it has evaluated, such as ReduceLROnPlateau, by its class.
    """
    wrapper = getattr(module, "DeepSpeedSchedulerWrapper", None)  # accelerate's

    def wait_first(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        _wait_for_saves()
        return function(*arguments, **options)

    def save_before_others_go(save: Callable[..., Any], trainer: Any, *arguments: Any, **options: Any) -> None:
        save(trainer, *arguments, **options)
        if trainer.args.save_total_limit == 1:
            _wait_for_saves()

    def evaluate_unwrapped(evaluate: Callable[..., Any], trainer: Any, *arguments: Any, **options: Any) -> Any:
        schedule = trainer.lr_scheduler
        if wrapper is not None and isinstance(schedule, wrapper):
            trainer.lr_scheduler = schedule.scheduler
        try:
            return evaluate(trainer, *arguments, **options)
        finally:
            trainer.lr_scheduler = schedule

    _wrap(module, "deepspeed_load_checkpoint", wait_first)
    _wrap(module.Trainer, "_get_output_dir", wait_first)
    _wrap(module.Trainer, "_save_optimizer_and_scheduler", save_before_others_go)
    _wrap(module.Trainer, "_evaluate", evaluate_unwrapped)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Have `wrapper` be called in place of a function, with that first; nothing where a version has no such one."""
    function = getattr(owner, name, None)
    if function is None:
        return

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        return wrapper(function, *arguments, **options)

    setattr(owner, name, call)


def _wait_for_saves() -> None:
    if saving := sys.modules.get("launcher.checkpoint.saving.save"):  # else nothing has been saved
        saving.wait_for_saves()


def patch_arguments(module: Any) -> None:
    """Have `TrainingArguments` of the module `transformers.training_args` follow LAUNCH_CONFIG_PATCH.

    The Trainer makes its batches, and counts its steps, by its arguments, and refuses a config that says otherwise.
    Where a patch changes micro-batch, accumulation or recomputation, the arguments with a `deepspeed` config become
    what it says, and the config the patched one, so that models are also built as its stage wants them.
    """
    arguments = module.TrainingArguments
    check_and_fill = arguments.__post_init__

    @functools.wraps(check_and_fill)
    def follow_patch(self: Any) -> None:
        if self.deepspeed:
            _patch(self)
        check_and_fill(self)

    arguments.__post_init__ = follow_patch


def _patch(arguments: Any) -> None:
    transformers, configs, facts = map(
        importlib.import_module, ("transformers", "launcher.config.load", "launcher.engine.facts")
    )
    patch = configs.patch_of_environment()
    sizes = {
        "per_device_train_batch_size": patch.get("train_micro_batch_size_per_gpu"),
        "gradient_accumulation_steps": patch.get("gradient_accumulation_steps"),
    }
    for name, size in sizes.items():
        if isinstance(size, int):
            setattr(arguments, name, size)
    if (patch.get("activation_checkpointing") or {}).get("blocks") is True:
        # transformers 5 has renamed them, and warns of the old names.
        kind = "activation" if hasattr(arguments, "activation_checkpointing") else "gradient"
        setattr(arguments, f"{kind}_checkpointing", True)
        if getattr(arguments, f"{kind}_checkpointing_kwargs") is None:
            setattr(arguments, f"{kind}_checkpointing_kwargs", {"use_reentrant": False})
    if patch:
        arguments.deepspeed = configs.patched(configs.load_config(arguments.deepspeed).raw, patch)
    # transformers 4 takes the micro-batch from a checkpoint that it continues from.
    if not arguments.auto_find_batch_size and int(transformers.__version__.partition(".")[0]) >= 5:
        facts.follow_micro_batch()
