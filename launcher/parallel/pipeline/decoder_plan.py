"""Where a model of blocks can be divided, found out by a trial forward of a few tokens in which no block runs.

Blocks return what they get meanwhile, so that the trial costs no more than embeddings and the head. It shows in
which form blocks return hidden states, and which other modules run before and behind them. Outputs of modules before
the blocks require a gradient and those of modules behind do not: whatever else requires one came past the blocks, and
such a model is refused.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.comm.device import random_numbers_kept
from launcher.comm.torch_internals import tree_flatten_with_path, tree_leaves, tree_map
from launcher.parallel.pipeline.placeholders import (
    EarlierBlock,
    EarlierPart,
    OutputShape,
    Placeholder,
    StageRun,
    hidden_of,
    in_form,
)

# Sizes of the trial, so odd that no other dimension of a model has them.
_NUM_SAMPLES, _LENGTH = 3, 5
_MAX_TUPLE = 3
_HINT = "give the model as a PipelineModule(layers=[...], loss_fn=...), or use ZeRO stage 3 or tensor parallelism"


@dataclass(frozen=True)
class Part:
    """A module with parameters beside the blocks, which runs as a whole."""

    name: str
    is_before: bool  # it runs before the blocks, on the first stage; else behind them, on the last
    output: OutputShape | None = None  # of one before the blocks


@dataclass(frozen=True)
class DecoderPlan:
    """Where a model can be divided."""

    blocks: tuple[str, ...]  # names, in the order in which they run
    tuple_size: int  # of what a block returns; 0: a tensor
    parts: tuple[Part, ...]

    def names(self, *, before: bool) -> list[str]:
        """Return the names of the parts before or behind the blocks."""
        return [part.name for part in self.parts if part.is_before is before]


def plan_decoder(model: nn.Module) -> DecoderPlan:
    """Return where `model` can be divided. Its weights and random numbers stay as they are.

    Raises: EngineError, with the reason, for a model that cannot be divided between its blocks.
    """
    _check_config(model)
    if any(isinstance(module, Placeholder) for module in model.modules()):
        raise _refusal(model, "it was divided before, and has some of its stages alone", "give engine.module instead")
    name, stack = _find_stack(model)
    with _quiet(model), without_cache(model):
        trial = _first_that_fits(model, name, stack)
        parts = tuple(_parts(model, name, trial))
        plan = DecoderPlan(tuple(f"{name}.{key}" for key in stack._modules), trial.tuple_size, parts)
        _try_later_stage(model, stack, plan, StageRun(torch.zeros_like(trial.first_hidden)))
    return plan


@contextlib.contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Within the block the model keeps no keys and values of earlier tokens: their count would be wrong on a stage."""
    configs = [config for config in _configs(model) if getattr(config, "use_cache", False)]
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True


def _configs(model: nn.Module) -> list[Any]:
    config = getattr(model, "config", None)
    inner = [getattr(config, name, None) for name in ("text_config", "decoder_config")]
    return [found for found in (config, *inner) if found is not None]


def _check_config(model: nn.Module) -> None:
    for config in _configs(model):
        if getattr(config, "is_encoder_decoder", False) is True:
            raise _refusal(model, "it has an encoder and a decoder, and every block of the decoder reads the encoder")
        if getattr(config, "layerdrop", None):
            raise _refusal(model, f"blocks are left out at random (layerdrop {config.layerdrop})", "set layerdrop to 0")
        for flag in ("output_hidden_states", "output_attentions", "output_router_logits"):
            if getattr(config, flag, False) is True:
                hint = f"set config.{flag} to false"
                raise _refusal(model, f"its config asks for outputs of all blocks ({flag})", hint)


def _find_stack(model: nn.Module) -> tuple[str, nn.ModuleList | nn.Sequential]:
    """Return the list of blocks: the longest one that is not inside of another."""
    found: dict[str, nn.ModuleList | nn.Sequential] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if is_inside or not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        kinds = {type(block) for block in module}
        has_params = all(next(block.parameters(), None) is not None for block in module)
        if has_params and (isinstance(module, nn.ModuleList) or len(kinds) == 1):
            found[name] = module
    if not found:
        raise _refusal(model, "it has no list of blocks (torch.nn.ModuleList)")
    longest = max(len(module) for module in found.values())
    names = [name for name, module in found.items() if len(module) == longest]
    if len(names) > 1:
        raise _refusal(model, f"it has several lists of {longest} blocks: {', '.join(names)}")
    return names[0], found[names[0]]


# ---- the trial ----


class _Unfit(Exception):
    """Ends a trial: the model cannot be divided, or its blocks return hidden states in another form."""


class _TrialBlock(Placeholder):
    """Returns what it gets."""

    def __init__(self, original: nn.Module, index: int, trial: _Trial) -> None:
        super().__init__(original)
        self._index, self._trial = index, trial

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._trial.pass_block(self._index, args, kwargs)


class _Trial:
    """What one trial forward saw. Its methods raise _Unfit."""

    def __init__(self, num_blocks: int, tuple_size: int) -> None:
        """tuple_size: of what blocks return here; 0: a tensor."""
        self.num_blocks, self.tuple_size = num_blocks, tuple_size
        self.num_passed = 0
        self.first_hidden = torch.empty(0)  # that the first block got
        self.last_hidden = self.first_hidden  # that the last one returned
        self.calls: dict[str, set[str]] = {}  # module beside the blocks -> when it was called
        self.outputs: dict[str, Any] = {}  # what such a module returned

    @property
    def when(self) -> str:
        return "before" if self.num_passed == 0 else "behind" if self.num_passed == self.num_blocks else "between"

    def pass_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = hidden_of(args, kwargs)
        if index != self.num_passed:
            number = self.num_passed + 1
            raise _Unfit(f"its blocks do not run once each, in order: block {index} came as number {number}")
        if index and hidden is not self.last_hidden:
            raise _Unfit(f"block {index} does not get the very tensor that block {index - 1} returned")
        for path, leaf in tree_flatten_with_path((args, kwargs))[0]:
            if leaf is not hidden and _wants_gradient(leaf):
                what = next((str(key.key) for key in path if hasattr(key, "key")), "an argument")
                raise _Unfit(f"its blocks get {what}, which the first stage computes, beside the hidden states")
        if index == 0:
            self.first_hidden = hidden.detach()
        self.num_passed += 1
        self.last_hidden = hidden.detach() if self.num_passed == self.num_blocks else hidden
        return in_form(self.last_hidden, self.tuple_size)

    def before_call(self, name: str, inputs: Any) -> None:
        self.calls.setdefault(name, set()).add(self.when)
        if self.when == "behind" and any(_wants_gradient(leaf) for leaf in tree_leaves(inputs)):
            raise _Unfit(f"{name} runs behind the blocks and reads what the first stage computes")

    def after_call(self, name: str, outputs: Any) -> Any:
        """Note what a module returned; return it with a graph of its own."""
        self.outputs[name] = outputs
        is_before = self.when == "before"

        def alone(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            return value.detach().requires_grad_(is_before).clone()  # no leaf: models may change it in place

        return tree_map(alone, outputs)

    def end(self, outputs: Any) -> None:
        if self.num_passed < self.num_blocks:
            raise _Unfit(f"its forward runs {self.num_passed} of {self.num_blocks} blocks")
        if any(_wants_gradient(leaf) for leaf in tree_leaves(outputs)):
            raise _Unfit("its outputs come from parameters that are no module's behind the blocks, or past the blocks")
        if not {_NUM_SAMPLES, _LENGTH} <= set(self.first_hidden.shape):
            raise _Unfit(f"its hidden states are not [samples, tokens, hidden] but {list(self.first_hidden.shape)}")


def _first_that_fits(model: nn.Module, name: str, stack: nn.ModuleList | nn.Sequential) -> _Trial:
    """Return the trial with the form of a block's outputs that the model understands: a tensor, or a tuple."""
    reason, furthest = "", -1
    for tuple_size in range(_MAX_TUPLE + 1):
        trial = _Trial(len(stack), tuple_size)
        try:
            with _observed(model, name, trial), _replaced(stack, _trial_blocks(stack, trial)):
                trial.end(_outputs(model))
        except _Unfit as unfit:
            problem = str(unfit)
        except Exception as error:  # noqa: BLE001  # a model's own code: whatever it raises is the reason
            problem = f"a trial forward of {_NUM_SAMPLES} × {_LENGTH} tokens failed: {type(error).__name__}: {error}"
        else:
            return trial
        if trial.num_passed > furthest:  # of several reasons that of the form with which the model came furthest
            reason, furthest = problem, trial.num_passed
    raise _refusal(model, reason)


def _outputs(model: nn.Module) -> Any:
    """Return what the model makes of a few tokens, which every argument without a default is."""
    names = [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    device = next(model.parameters()).device
    tokens = torch.ones(_NUM_SAMPLES, _LENGTH, dtype=torch.int64, device=device)  # a token of every vocabulary
    with torch.enable_grad():
        return model.forward(*[tokens] * max(1, len(names)))


def _trial_blocks(stack: nn.ModuleList | nn.Sequential, trial: _Trial) -> dict[str, nn.Module]:
    return {key: _TrialBlock(block, index, trial) for index, (key, block) in enumerate(stack._modules.items()) if block}


@contextlib.contextmanager
def _replaced(module: nn.Module, others: dict[str, nn.Module]) -> Iterator[None]:
    kept = dict(module._modules)
    module._modules.update(others)
    try:
        yield
    finally:
        module._modules.update(kept)


@contextlib.contextmanager
def _observed(model: nn.Module, stack: str, trial: _Trial) -> Iterator[None]:
    """Have the trial see each module beside the blocks that has parameters."""
    handles = []
    for name, module in model.named_modules():
        if _has_stack(name, stack) or name.startswith(f"{stack}.") or next(module.parameters(), None) is None:
            continue
        handles.append(
            module.register_forward_pre_hook(
                lambda _module, args, kwargs, name=name: trial.before_call(name, (args, kwargs)), with_kwargs=True
            )
        )
        handles.append(
            module.register_forward_hook(lambda _module, _args, outputs, name=name: trial.after_call(name, outputs))
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Run modules as in evaluation, without dropout or recomputation, and keep random numbers as they were."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with random_numbers_kept():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


# ---- the parts beside the blocks ----


def _parts(model: nn.Module, stack: str, trial: _Trial) -> Iterator[Part]:
    """Yield the topmost modules beside the blocks that are called and have parameters. Raises: EngineError."""
    pending = [("", model)]
    while pending:
        name, module = pending.pop(0)
        if name == stack:
            continue
        whens = trial.calls.get(name)
        if whens is None or _has_stack(name, stack):  # what has the blocks inside, or is never called itself
            own = [own for own, _ in module.named_parameters(prefix=name, recurse=False)]
            if own:
                raise _refusal(model, f"{own[0]} is read by no module's forward, so no stage is known to need it")
            children = [(f"{name}.{child}" if name else child, inner) for child, inner in module.named_children()]
            pending = children + pending
            continue
        if len(whens) > 1 or "between" in whens:
            raise _refusal(model, f"{name} runs {' and '.join(sorted(whens))} the blocks")
        is_before = whens == {"before"}
        yield Part(name, is_before, _output_shape(model, name, trial) if is_before else None)


def _has_stack(name: str, stack: str) -> bool:
    return name in ("", stack) or stack.startswith(f"{name}.")


def _output_shape(model: nn.Module, name: str, trial: _Trial) -> OutputShape:
    outputs = trial.outputs.get(name)
    if not isinstance(outputs, Tensor):
        raise _refusal(model, f"{name} returns {type(outputs).__name__} and not a tensor")
    axes = {size: dim for dim, size in enumerate(trial.first_hidden.shape)}
    *leading, last = outputs.shape
    dims = [axes[size] if size in (_NUM_SAMPLES, _LENGTH) else size for size in leading]
    constant = [size not in (_NUM_SAMPLES, _LENGTH) for size in leading]
    return OutputShape((*dims, last), (*constant, True))


def _try_later_stage(model: nn.Module, stack: nn.ModuleList | nn.Sequential, plan: DecoderPlan, run: StageRun) -> None:
    """Run the forward as the last stage does, with nothing of the first. Raises: EngineError where it needs more.

    run: has hidden states.
    """
    blocks = {
        key: EarlierBlock(block, run, plan.tuple_size) for key, block in stack._modules.items() if block is not None
    }
    with contextlib.ExitStack() as replaced:
        replaced.enter_context(_replaced(stack, dict(blocks)))
        for part in plan.parts:
            if part.output is not None:
                parent, _, key = part.name.rpartition(".")
                other = EarlierPart(model.get_submodule(part.name), run, part.output)
                replaced.enter_context(_replaced(model.get_submodule(parent), {key: other}))
        try:
            outputs = _outputs(model)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise _refusal(model, f"its forward needs modules of the first stage on every stage: {reason}") from error
    if any(isinstance(leaf, Tensor) and bool(leaf.isnan().any()) for leaf in tree_leaves(outputs)):
        raise _refusal(model, "its forward reads weights of the first stage behind the blocks, not through a module")


def _wants_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _refusal(model: nn.Module, reason: str, hint: str = _HINT) -> EngineError:
    return EngineError(f"{type(model).__name__} cannot be divided into pipeline stages: {reason}", hint=hint)
