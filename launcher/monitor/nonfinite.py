"""Where a loss that is not finite comes from: the first module whose output is not. Costs nothing before there is one.

A number is looked at where it is on the host anyway. After the first that is not finite, the next forward pass is
watched, once: on a GPU it waits for each module.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

from torch import Tensor, nn

from launcher.journal.rank import RankJournal

_MAX_TIMES = 3  # that a forward pass is watched


class NonfiniteWatch:
    """Writes into the journal that a loss or norm is not finite, and the first module that it is seen in."""

    def __init__(self, journal: RankJournal, model: nn.Module | None) -> None:
        self._journal, self._model = journal, None if model is None else weakref.ref(model)
        self._step = 0
        self._is_finite = True
        self._last_finite = 0  # the last step that was looked at and was finite
        self._num_times = 0
        self._handles: list[Any] = []

    def look(self, step: int, loss: float | None, norm: float | None) -> None:
        """Look at what a step came to; None: not known."""
        bad = [
            name for name, value in (("loss", loss), ("norm", norm)) if value is not None and not math.isfinite(value)
        ]
        was_finite, self._is_finite = self._is_finite, not bad
        if not bad:
            self._last_finite = step
        if not bad or not was_finite:
            return
        self._step = step
        self._journal.add("nonfinite", step=step, what=bad[0], module=None, last_finite=self._last_finite)
        self._num_times += 1
        if self._num_times <= _MAX_TIMES and not self._handles:
            self._watch()

    def _watch(self) -> None:
        """Watch the next forward pass of the model."""
        model = None if self._model is None else self._model()
        if model is None:
            return
        for name, module in model.named_modules():
            if module is not model:
                self._handles.append(module.register_forward_hook(self._check_of(name)))
        self._handles.append(model.register_forward_hook(lambda *_: self._end()))

    def _check_of(self, name: str) -> Any:
        def check(_module: nn.Module, _inputs: Any, output: Any) -> None:
            outputs = output if isinstance(output, (tuple, list)) else (output,)
            if self._handles and not all(_is_finite(each) for each in outputs):
                self._journal.add("nonfinite", step=self._step, what="output", module=name, last_finite=None)
                self._end()

        return check

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _is_finite(value: Any) -> bool:
    return not isinstance(value, Tensor) or not value.is_floating_point() or bool(value.isfinite().all())
