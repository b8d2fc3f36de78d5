"""Models that no stage can train, refused before anything is changed."""

from __future__ import annotations

import torch
from torch import nn

from launcher.base.errors import EngineError


def check_model(model: nn.Module) -> None:
    """Raise EngineError for a model with modules or parameters that no stage can train."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise EngineError(
                f"{_shown(name)} is a scripted module (torch.jit), whose forward runs no hooks",
                hint="pass the module it was made from; model.compile() makes it faster",
            )
    for name, param in model.named_parameters():
        if param.is_complex():
            raise EngineError(
                f"the parameter {name} is complex, which fp32 and 16-bit training cannot hold",
                hint="keep torch.view_as_real(...) of it as the parameter, and use torch.view_as_complex in forward",
            )


def _shown(name: str) -> str:
    return f"the module {name}" if name else "the model"
