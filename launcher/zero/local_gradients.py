"""What autograd leaves on a unit's parameters on this rank, collected in one flat buffer.

[Note: when gradients move] On a CPU each gradient moves as soon as it has been computed: it is in the cache then, and
its memory is free for the next one, so that a unit has one buffer and not two. On a GPU such a copy is a kernel launch
from Python within backward for each parameter, and the launches cost more than the bytes. There gradients stay in
`param.grad` until the unit has all of them, and one call of torch's `_foreach_copy_` moves them; until then the buffer
is not borrowed, and the gradients are freed as the buffer is filled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.comm.buffers import BufferPool, LentTensor
from launcher.comm.torch_internals import is_in_backward, no_torch_function, wrapper_of
from launcher.kernels.cpu import scaled_copy
from launcher.sharding.layout import UnitLayout

_ADD_IN_PLACE = torch.ops.aten.add_.Tensor


class TakenGradient(Tensor):
    """What `param.grad` is between backward and step where no rank has the whole gradient: shape and type, no values.

    None in its place would be skipped in silence by `clip_grad_norm_` and other readers of gradients. Any
    computing with it raises an EngineError.
    """

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, param: Tensor) -> TakenGradient:
        """Make one that torch accepts as the gradient of `param`."""
        return wrapper_of(cls, param)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TakenGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Autograd adds a gradient of a backward that no engine runs. The engine's hook, which runs next, says so.
        if operation is _ADD_IN_PLACE and is_in_backward():
            return args[0]
        raise EngineError(
            f"param.grad was used ({operation}) where no rank has the whole gradient in the parameter's type: there"
            " are views of gradients at stage 0, and on one rank, in fp32",
            hint="launcher.zero.safe_get_full_grad(param) and safe_set_full_grad(param, value) read and write it on"
            ' every rank; set "gradient_clipping" in the config in place of clip_grad_norm_, and read'
            " engine.get_global_grad_norm()",
        )


class LocalGradients:
    """The gradients of one unit before they are summed over the ranks."""

    def __init__(
        self,
        params: list[nn.Parameter],
        layout: UnitLayout,
        buffers: BufferPool,
        *,
        dtype: torch.dtype,
        kept: LentTensor | None,
        scale: float,
        moves_together: bool,
    ) -> None:
        """kept: 1-D [padded], a buffer that lasts until the step; None: one of `dtype` is borrowed from `buffers` while
        it is needed.

        scale: what gradients are multiplied by as they are taken. moves_together: once a unit has all of them.
        """
        self._params = params
        self._layout = layout
        self._buffers = buffers
        self._dtype = dtype
        self._kept = kept
        self._borrowed: Tensor | None = None  # 1-D [padded]; None: none is needed now
        self._is_outgoing = False
        self._early_scale = scale
        self._scale = scale  # of the gradients of this backward
        self._moves_together = moves_together
        self._filled = [False] * len(params)  # has a gradient in the buffer
        self._arrived = [False] * len(params)  # has a gradient of the current backward
        self._num_arrived = 0
        self.num_backwards = 0  # since the buffer was last empty
        self.used = [False] * len(params)  # had a gradient on this rank since the last step
        self._taken: list[TakenGradient | None] = [None] * len(params)
        self._is_in_pass = False
        self._left: list[Tensor | None] = [None] * len(params)  # what `param.grad` was made outside of a pass
        self._is_late = [False] * len(params)  # that is a gradient that was not taken
        self.written: dict[int, Tensor | None] = {}  # what the user has made of what was left, by parameter

    def begin_backward(self, *, is_outgoing: bool, factor: float = 1.0) -> None:
        """Forget which gradients of the previous backward have arrived.

        factor: what gradients of this one are multiplied by, beside `scale`. is_outgoing: what this backward leaves is
        sent as it is. With nothing to add it to, it is collected in a borrowed buffer of the type that travels, also
        where there is one that lasts.
        """
        self.withdraw()
        self._forget_left()
        self._is_in_pass = True
        self._scale = self._early_scale * factor
        if self.num_backwards == 0:
            self._is_outgoing = is_outgoing
        self._arrived = [False] * len(self._arrived)
        self._num_arrived = 0
        self.num_backwards += 1

    @property
    def is_complete(self) -> bool:
        """Whether every parameter's gradient of this backward has arrived, at least once."""
        return self._num_arrived == len(self._arrived)

    @property
    def has_untaken(self) -> bool:
        """Whether autograd has left gradients that were not taken. It adds later ones to them."""
        if not self._is_in_pass:
            return any(self._is_late)
        return any(param.grad is not None for param in self._params)

    def take(self, index: int) -> None:
        """Take the gradient over that autograd has left on parameter `index`, if there is one."""
        if self._params[index].grad is None:
            return
        self.used[index] = True
        if not self._arrived[index]:
            self._arrived[index] = True
            self._num_arrived += 1
        if not self._moves_together:
            self._move(index)
        elif self.is_complete:
            self.move_all()

    def take_all(self) -> None:
        """Take every gradient there is."""
        for index in range(len(self._params)):
            self.take(index)
        self._forget_left()

    def move_all(self) -> None:
        """Move the gradients that were taken and not moved yet into the buffer."""
        if not self._moves_together:
            return
        first: list[tuple[Tensor, Tensor]] = []
        further: list[tuple[Tensor, Tensor]] = []
        for index, param in enumerate(self._params):
            if param.grad is not None:
                (further if self._filled[index] else first).append(self._target_and_gradient(index))
        if first:
            targets, grads = map(list, zip(*first, strict=True))
            torch._foreach_copy_(targets, grads)
            if self._scale != 1.0:
                torch._foreach_mul_(targets, self._scale)
        if further:
            targets, grads = map(list, zip(*further, strict=True))
            torch._foreach_add_(targets, grads, alpha=self._scale)

    def _move(self, index: int) -> None:
        is_further = self._filled[index]
        target, grad = self._target_and_gradient(index)
        if is_further:
            target.add_(grad, alpha=self._scale)
        else:
            scaled_copy(target, grad, self._scale)

    def _target_and_gradient(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a parameter's place in the buffer and what is going to be moved there, of the same shape."""
        param = self._params[index]
        grad, param.grad = param.grad, None
        assert grad is not None
        if grad.is_sparse:
            grad = grad.to_dense()
        slot = self._layout.slots[index]
        if grad.numel() != slot.numel:
            raise EngineError(
                f"the parameter {slot.name} has another shape than at initialize(): {tuple(slot.shape)} then,"
                f" {tuple(grad.shape)} now",
                hint="change the model before initialize(), or call initialize() anew; at stage 3 change it within"
                " launcher.zero.GatheredParameters",
            )
        self._filled[index] = True
        return self.flat()[slot.offset : slot.end].view(grad.shape), grad

    def leave(self, gradients: Tensor | None, *, shows: bool, shows_unused: bool) -> None:
        """End a pass: leave in `param.grad` what users may find there, until `withdraw`.

        Gradients that were not taken stay. gradients: 1-D [padded], to leave views of it; None: a `TakenGradient` for
        each. shows: leave either. shows_unused: also where this rank has no gradient.
        """
        self._is_in_pass = False
        for index, param in enumerate(self._params):
            self._is_late[index] = param.grad is not None
            if param.grad is None and shows and (self.used[index] or shows_unused):
                shown: Tensor | None = self._taken[index]
                slot = self._layout.slots[index]
                if gradients is not None and param.numel() == slot.numel and param.dtype == gradients.dtype:
                    shown = gradients[slot.offset : slot.end].view(param.shape)
                elif shown is None or shown.shape != param.shape or shown.dtype != param.dtype:
                    shown = self._taken[index] = TakenGradient(param)
                param.grad = shown
            self._left[index] = param.grad
            if index in self.written:
                param.grad = self.written.pop(index)

    def withdraw(self) -> None:
        """Take what was left out of `param.grad`, and note in `written` what is there in its place."""
        for index, param in enumerate(self._params):
            grad, left = param.grad, self._left[index]
            if grad is not left:
                self.written[index] = grad
            elif grad is None or self._is_late[index]:
                continue
            param.grad = self._left[index] = None
            self._is_late[index] = False

    @property
    def has_written(self) -> bool:
        """Whether a user has written to `param.grad`, other than into a view of the gradient."""
        if self.written:
            return True
        return not self._is_in_pass and any(
            param.grad is not left for param, left in zip(self._params, self._left, strict=True)
        )

    def _forget_left(self) -> None:
        self._left = [None] * len(self._params)
        self._is_late = [False] * len(self._params)

    def gradient_of(self, index: int) -> Tensor:
        """Return the place in the buffer of the gradient of parameter `index`, 1-D, with zeros where there was none."""
        self.move_all()
        slot = self._layout.slots[index]
        gradient = self.flat()[slot.offset : slot.end]
        if not self._filled[index]:
            gradient.zero_()
        self._filled[index] = self.used[index] = True
        return gradient

    def shows_sum(self, index: int) -> bool:
        """Whether autograd adds to what counts for the step when it adds to the `param.grad` of parameter `index`."""
        left = self._left[index]
        return left is not None and not isinstance(left, TakenGradient)

    def drop(self, index: int) -> None:
        """Forget the gradient autograd left on parameter `index`."""
        self._params[index].grad = self._left[index] = None
        self._is_late[index] = False

    def drop_untaken(self) -> None:
        """Forget all gradients that were not taken."""
        for index in range(len(self._params)):
            self.drop(index)

    def flat(self) -> Tensor:
        """Return the buffer, 1-D [padded]."""
        if self._kept is not None and not self._is_outgoing:
            return self._kept.borrow()
        if self._borrowed is None:
            self._borrowed = self._buffers.borrow(self._layout.padded_numel, self._dtype)
        return self._borrowed

    def completed(self) -> Tensor:
        """Return the buffer with zeros where this rank has no gradient: other ranks may have one."""
        self.move_all()
        flat = self.flat()
        for slot, filled in zip(self._layout.slots, self._filled, strict=True):
            if not filled:
                flat[slot.offset : slot.end].zero_()
        flat[self._layout.numel :].zero_()
        return flat

    def resume(self) -> None:
        """Note that the buffer holds what a further backward adds to."""
        self._filled = [True] * len(self._filled)
        self.num_backwards = 1

    def empty(self) -> None:
        """Note that what was in the buffer is elsewhere, and give it back unless it is kept."""
        self._filled = [False] * len(self._filled)
        self.num_backwards = 0
        self._is_outgoing = False
        if self._borrowed is not None:
            self._buffers.give_back(self._borrowed)
            self._borrowed = None

    def end_step(self) -> None:
        """Forget everything: the next gradients are those of another step."""
        self.empty()
        self.withdraw()
        self.written.clear()
        self.used = [False] * len(self.used)
