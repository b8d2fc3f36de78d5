"""One backward pass: what is opened before it and closed after it, whoever calls it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from launcher.base.errors import EngineError
from launcher.engine.watch import Watch
from launcher.zero.reducer import GradientReducer
from launcher.zero.schedule import ParameterSchedule


def check_loss(loss: Tensor) -> None:
    """Raise EngineError for a loss that is not a scalar or has no graph."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise EngineError(f"engine.backward() needs a scalar loss, got {got}", hint="reduce it with loss.mean()")
    if not loss.requires_grad:
        raise EngineError(
            "the loss has no graph to go back through",
            hint="compute it from engine(...) in training mode, outside of torch.no_grad()",
        )


def scaled_up(loss: Tensor, loss_scale: float) -> Tensor:
    """Return the loss times its scale, in fp32: a 16-bit product would overflow."""
    return loss if loss_scale == 1.0 else loss.float() * loss_scale


class BackwardPass:
    """Lets the reducer and the schedule know when a backward pass begins and ends."""

    def __init__(self, reducer: GradientReducer, schedule: ParameterSchedule, watch: Watch) -> None:
        self._reducer = reducer
        self._schedule = schedule
        self._watch = watch
        self.shows_gradients = True  # between backward and step, in `param.grad`
        self._stack = contextlib.ExitStack()
        self._is_open = False
        self._is_broken = False  # an exception ended it: units may still be gathered, or on their way
        self._is_noted = False  # the engine knows that

    @contextlib.contextmanager
    def running(self, *, is_boundary: bool) -> Iterator[None]:
        """Return the context of a backward pass that the engine calls."""
        self.recover()
        self._begin(is_boundary=is_boundary)
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

    def begins_at(self, loss: Tensor, is_boundary: Callable[[], bool]) -> Tensor:
        """Have the pass begin when autograd reaches `loss`, and end when autograd has finished. Returns `loss`.

        is_boundary: asked at the begin. Several such losses may be added and go back together.
        """

        def on_gradient(_grad: Tensor) -> None:
            if not self._is_open:
                self._begin(is_boundary=is_boundary())
                torch.autograd.Variable._execution_engine.queue_callback(self._end)

        loss.register_hook(on_gradient)
        return loss

    def note_exception(self) -> bool:
        """Whether an exception has ended a pass, once for each: gradients of a part of the model are no gradient.

        Whoever calls it must begin the accumulation anew. It may be called within a pass, and in any thread.
        """
        is_over = torch._C._current_graph_task_id() == -1 and self._schedule.is_in_thread
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

    def _begin(self, *, is_boundary: bool) -> None:
        self._is_open = True
        self._stack.enter_context(self._watch.phase("backward"))
        self._reducer.begin_backward(is_boundary=is_boundary)
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
