"""One backward pass: what is opened before it and closed after it, whoever calls it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from launcher.base.errors import EngineAssertionError, EngineError, EngineRuntimeError
from launcher.comm.torch_internals import after_backward, is_executed, is_in_backward, is_in_transform, outside_graphs
from launcher.engine.watch import Watch
from launcher.zero.reducer import GradientReducer
from launcher.zero.schedule import ParameterSchedule
from launcher.zero.tensors import tensors_in


def check_loss(loss: Tensor) -> None:
    """Raise EngineError for a loss that is not a scalar or has no graph."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise EngineAssertionError(f"the loss must be a scalar tensor, got {got}", hint="reduce it with loss.mean()")
    if not loss.requires_grad:
        raise EngineError(
            "the loss has no graph to go back through",
            hint="compute it from engine(...) in training mode, outside of torch.no_grad()",
        )


def scaled_up(loss: Tensor, loss_scale: float) -> Tensor:
    """Return the loss times its scale, in fp32: a 16-bit product would overflow."""
    return loss if loss_scale == 1.0 else loss.float() * loss_scale


@dataclass(frozen=True)
class ScriptsPass:
    """What an engine says of a backward pass that the script has begun by itself."""

    is_boundary: bool
    factor: float  # what gradients are multiplied by: the script has not divided by the accumulation steps


class BackwardPass:
    """Lets the reducer and the schedule know when a backward pass begins and ends."""

    def __init__(self, reducer: GradientReducer, schedule: ParameterSchedule, watch: Watch) -> None:
        self._reducer = reducer
        self._schedule = schedule
        self._watch = watch
        self.shows_gradients = True  # between backward and step, in `param.grad`
        self._stack = contextlib.ExitStack()
        self._is_open = False
        self._is_scripts = False  # the script has begun it by a `backward()` of its own
        self._is_broken = False  # an exception ended it: units may still be gathered, or on their way
        self._is_noted = False  # the engine knows that

    @contextlib.contextmanager
    def running(self, *, is_boundary: bool) -> Iterator[None]:
        """Return the context of a backward pass that the engine calls."""
        self.recover()
        self._begin(is_boundary=is_boundary, is_called=True)
        try:
            yield
        except BaseException as error:
            self._abort(error)
            if isinstance(error, RuntimeError) and "returned an invalid gradient" in str(error):
                raise _sharded_error() from error
            if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _RELEASED):
                raise _released_error() from error
            raise
        self._end()

    def take_set_gradients(self, params: Iterable[nn.Parameter], *, may_count: bool) -> None:
        """Run a pass without a graph, for a step of a single rank whose gradients the user has set in `param.grad`.

        They must be multiplied by the loss scale where there is one. may_count: the rank is alone, and the step that of
        a single micro-batch. Raises: EngineError where none may count: several ranks would have to agree first.
        """
        if not (may_count and self._reducer.num_written):
            raise EngineError("engine.step() was called without a backward", hint="call engine.backward(loss) first")
        written = [(param, param.grad) for param in params if param.grad is not None]
        for param, _ in written:
            param.grad = None
        try:
            with self.running(is_boundary=True):
                pass  # no gradients arrive; those that were set replace the sums, as they do after any other pass
        finally:
            for param, grad in written:
                param.grad = grad

    def hook_loss(self, loss: Tensor, is_boundary: Callable[[], bool]) -> Tensor:
        """Have the pass begin when autograd reaches `loss`, and end when autograd has finished. Returns `loss`.

        is_boundary: asked at the begin. Several such losses may be added and go back together.
        """

        def on_gradient(_grad: Tensor) -> None:
            if not self._is_open:
                self._begin(is_boundary=is_boundary())
                after_backward(self._end)
            elif self._is_scripts:
                raise EngineError(
                    "one backward pass has a loss of engine.scale(loss) and another one that was not scaled",
                    hint="scale all losses, or none",
                )

        loss.register_hook(on_gradient)
        return loss

    @outside_graphs
    def hook_outputs(self, outputs: Any, inputs: Any, begin: Callable[[Tensor | None], ScriptsPass]) -> None:
        """Have a pass begin when a `backward()` of the script reaches what the engine has returned.

        Nothing happens in a pass that an engine was asked for, nor in `torch.autograd.grad`, which leaves no gradient
        on parameters. begin: called with the output, detached, if it is one number. It may raise.
        """
        if is_in_transform():
            return
        given = list(tensors_in(inputs))
        passed_on = set(map(id, given))
        # A hook must hold nothing behind which its own tensor is; inputs come before it.
        sources = [tensor for tensor in given if tensor.requires_grad]
        for tensor in tensors_in(outputs):
            if tensor.grad_fn is not None and id(tensor) not in passed_on:
                value = tensor.detach() if tensor.numel() == 1 else None
                tensor.register_hook(functools.partial(self._on_output, sources, begin, value))

    def _on_output(
        self,
        sources: Sequence[Tensor],
        begin: Callable[[Tensor | None], ScriptsPass],
        value: Tensor | None,
        _grad: Tensor,
    ) -> None:
        if self._is_open or self._reducer.is_beside or not self._accumulates(sources):
            return
        found = begin(value)
        self._begin(is_boundary=found.is_boundary, factor=found.factor, is_scripts=True)
        after_backward(self._end)

    def _accumulates(self, sources: Sequence[Tensor]) -> bool:
        """Whether the autograd call that runs leaves gradients on parameters: it is no `torch.autograd.grad`.

        Parameters are not in its graph where reentrant checkpointing has all of them; then leaves behind the inputs say
        so, and where there are none, nothing but a parameter can have been asked for.
        """
        params = (param for param in self._reducer.params if param.requires_grad)
        if any(_is_executed(get_gradient_edge(param).node) for param in params):
            return True
        return not sources or any(_is_executed(_leaf_behind(source)) for source in sources)

    def note_exception(self) -> bool:
        """Whether an exception has ended a pass, once for each: gradients of a part of the model are no gradient.

        Whoever calls it must begin the accumulation anew. It may be called within a pass, and in any thread.
        """
        is_over = not is_in_backward() and self._schedule.is_in_thread
        if self._is_open and is_over:  # it was within an autograd call of the user's
            self._abort(None)
        self._note_spoiled()
        if not self._is_broken or self._is_noted or not is_over:
            return False
        self._is_noted = True
        return True

    def recover(self) -> bool:
        """Clean up after a pass that an exception ended, before the next one begins. Then every rank must call it.

        Returns whether there was one that was not noted: all gradients since the last step are dropped. Raises:
        EngineError where the exception was not caught alike on all ranks.
        """
        if self._is_open:  # it was within an autograd call of the user's
            self._abort(None)
        self._note_spoiled()
        if not self._is_broken:
            return False
        self._reducer.order.rendezvous(self._reducer.group, "backward")
        self._is_broken = False
        self._schedule.reset()
        self._reducer.discard()
        return not self._is_noted

    def _note_spoiled(self) -> None:
        """Have gradients dropped that a `loss.backward()` of the script, which was refused, has added to."""
        if self._reducer.is_spoiled and not self._is_broken:
            self._is_broken, self._is_noted = True, False

    def _begin(
        self, *, is_boundary: bool, factor: float = 1.0, is_scripts: bool = False, is_called: bool = False
    ) -> None:
        self._is_open, self._is_scripts = True, is_scripts
        self._stack.enter_context(self._watch.phase("backward", is_called=is_called))
        self._reducer.begin_backward(is_boundary=is_boundary, factor=factor, is_scripts=is_scripts)
        self._schedule.begin_backward()

    def _end(self) -> None:
        self._is_open = False
        self._schedule.end_backward()
        self._reducer.end_backward()
        self._reducer.leave(shows=self.shows_gradients)
        self._stack.close()

    def _abort(self, error: BaseException | None) -> None:
        """Leave the pass without waiting for anything: the peers may be gone, and the error must be seen."""
        self._is_open = False
        self._is_broken, self._is_noted = True, False
        self._reducer.abort_backward()
        self._schedule.abort_backward()
        self._stack.__exit__(type(error) if error is not None else None, error, None)


def _leaf_behind(tensor: Tensor) -> Node:
    """Return the node of a leaf that a tensor was computed from, or its own."""
    node = get_gradient_edge(tensor).node
    while before := [each for each, _ in node.next_functions if each is not None]:
        node = before[0]
    return node


def _is_executed(node: Node) -> bool:
    """Whether the autograd call that runs adds to the gradient of the leaf that `node` belongs to."""
    try:
        return is_executed(node)
    except RuntimeError:  # torch's answer where `torch.autograd.grad` was asked for the gradient of this leaf
        return False


def unscaled_error() -> EngineRuntimeError:
    """Return the error of a `backward()` of the script's own with fp16."""
    return EngineRuntimeError(
        "Loss scaling is required with fp16, and backward() was called without it",
        hint="call engine.scale(loss).backward(), or engine.backward(loss), instead of loss.backward()",
    )


def _sharded_error() -> EngineError:
    return EngineError(
        "autograd found another shape of a parameter in backward than in forward: at stage 3 it was read while it was"
        " sharded",
        hint="read it as an attribute of its module within the model's forward, such as self.weight (self.parameters()"
        " does not gather), or use stage 2; weight decay is the optimizer's",
    )


# What torch says where a parameter that backward reads has no elements: whether it has kept a view of it, or itself.
_RELEASED = (
    "out of bounds for storage of size 0",
    "must be a matrix, got 1-D tensor",
    "size of tensor a (0) must",
    "size of tensor b (0) at",
)


def _released_error() -> EngineError:
    return EngineError(
        "backward read a parameter after it was released: at stage 3 nothing gathers parameters for a gradient of a"
        " gradient (create_graph=True), nor for an output that no tensor is found in, such as an iterator or a closure",
        hint="have modules return tensors in tuples, lists, sets, dictionaries or attributes of objects; keep the"
        " parameters that backward reads unsharded with stage3_param_persistence_threshold, or use stage 2",
    )
