"""Inputs of checkpointed layers in host memory: `deepspeed.runtime.activation_checkpointing.offload_activations`.

Within its block, what a layer of transformers with gradient checkpointing gets as hidden states is copied to the host
after the forward, and back for the recomputation. Other tensors that autograd saves stay where they are.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from launcher.base.errors import EngineRuntimeError

_active: list[CheckpointHiddenStatesOffload] = []  # the innermost last


@dataclass
class OffloadStats:
    """What a block has seen."""

    saved_tensors_seen: int = 0
    marked_tensors: int = 0
    skipped_marked_tensors: int = 0  # too small, or in host memory already
    offloaded_tensors: int = 0
    offloaded_bytes: int = 0
    restored_tensors: int = 0
    restored_bytes: int = 0
    kept_last_tensors: int = 0  # needed again before they had to leave


@dataclass(eq=False)
class _Kept:
    """A marked tensor: on the device until later ones come, then on the host."""

    on_device: Tensor | None
    device: torch.device
    on_host: Tensor | None = None


class CheckpointHiddenStatesOffload(saved_tensors_hooks):
    """A block of forward and backward whose marked tensors are saved in host memory."""

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_bytes: int = 1024,
        max_fwd_stash_count: int = 2,
        max_cpu_buffer_pool_count: int = 64,
        keep_last_count: int = 1,
    ) -> None:
        """min_offload_bytes: smaller tensors stay. keep_last_count: so many of the last marked tensors stay, which
        backward needs first. use_pin_memory: page-lock the copies, so that the host waits for none.

        use_streams, max_fwd_stash_count, max_cpu_buffer_pool_count: part of the signature; copies are queued on the
        device's current stream, and torch's allocator keeps freed host memory. Raises: ValueError below 0.
        """
        if keep_last_count < 0:
            raise ValueError(f"keep_last_count is {keep_last_count}: give 0 or more")
        super().__init__(self._pack, self._unpack)
        self.stats = OffloadStats()
        self._pins = use_pin_memory and torch.accelerator.is_available()
        self._min_bytes, self._keep_last = min_offload_bytes, keep_last_count
        self._marks: Counter[int] = Counter()  # ids of tensors that are alive in their caller
        self._last: deque[_Kept] = deque()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> CheckpointHiddenStatesOffload:  # type: ignore[override]  # torch returns None
        """Raises: EngineRuntimeError within its own block."""
        if self in _active:
            raise EngineRuntimeError(
                "CheckpointHiddenStatesOffload is not re-entrant", hint="make another one for the inner block"
            )
        self.stats = OffloadStats()
        if not _active and find_spec("transformers") is not None:
            self._stack.enter_context(_marking_layers())
        _active.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.remove(self)
        self._stack.close()
        self._marks.clear()
        self._last.clear()

    def mark(self, tensor: Tensor) -> None:
        """Have a tensor kept on the host where autograd saves it next."""
        self._marks[id(tensor)] += 1
        self.stats.marked_tensors += 1

    def unmark(self, tensor: Tensor) -> bool:
        """Take a mark back; return whether there was one."""
        if not self._marks[id(tensor)]:
            return False
        self._marks[id(tensor)] -= 1
        return True

    def _pack(self, tensor: Tensor) -> Tensor | _Kept:
        self.stats.saved_tensors_seen += 1
        if not self.unmark(tensor):
            return tensor
        if tensor.device.type == "cpu" or tensor.nbytes < self._min_bytes:
            self.stats.skipped_marked_tensors += 1
            return tensor
        kept = _Kept(tensor.detach(), tensor.device)
        self._last.append(kept)
        while len(self._last) > self._keep_last:
            self._send_out(self._last.popleft())
        return kept

    def _send_out(self, kept: _Kept) -> None:
        tensor = kept.on_device
        if tensor is None:
            return
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._pins)
        kept.on_host = host.copy_(tensor, non_blocking=self._pins)
        kept.on_device = None  # its memory is used again behind the copy, which is on the same stream
        self.stats.offloaded_tensors += 1
        self.stats.offloaded_bytes += tensor.nbytes

    def _unpack(self, kept: Tensor | _Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if kept.on_device is not None:
            self.stats.kept_last_tensors += 1
            return kept.on_device
        assert kept.on_host is not None
        self.stats.restored_tensors += 1
        self.stats.restored_bytes += kept.on_host.nbytes
        return kept.on_host.to(kept.device, non_blocking=self._pins)


get_checkpoint_hidden_states_offloading_ctx_manager = CheckpointHiddenStatesOffload


@contextlib.contextmanager
def _marking_layers() -> Iterator[None]:
    """Have layers of transformers mark the hidden states that they checkpoint."""
    from transformers.modeling_layers import GradientCheckpointingLayer as Layer

    own = vars(Layer).get("__call__")
    call = Layer.__call__

    def marking_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_saved = self.training and torch.is_grad_enabled() and getattr(self, "gradient_checkpointing", False)
        if not is_saved or not _active or not args or not isinstance(args[0], Tensor):
            return call(self, *args, **kwargs)
        found = _active[-1]
        found.mark(args[0])
        try:
            return call(self, *args, **kwargs)
        finally:
            found.unmark(args[0])  # an id may be another tensor's later

    setattr(Layer, "__call__", marking_call)  # noqa: B010  # of the class
    try:
        yield
    finally:
        if own is None:
            del Layer.__call__
        else:
            setattr(Layer, "__call__", own)  # noqa: B010
