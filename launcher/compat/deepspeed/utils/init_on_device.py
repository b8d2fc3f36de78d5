"""`deepspeed.utils.init_on_device`: models that are built on another device, such as "meta"."""

from __future__ import annotations

from types import TracebackType

import torch

__all__ = ["OnDevice"]


class OnDevice:
    """What is built inside is on `device`, and its floating-point parameters in `dtype`, by torch's own defaults."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled

    def __enter__(self) -> None:
        if self.enabled:
            self._saved = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self.device.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            self.device.__exit__(kind, error, trace)
            torch.set_default_dtype(self._saved)
