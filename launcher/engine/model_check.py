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


class ModelFacts:
    """What `initialize()` relied on. Changed afterwards, parameters would go untrained, or apart from their units."""

    def __init__(self, model: nn.Module) -> None:
        self._dtypes = [(name, param, param.dtype) for name, param in model.named_parameters()]
        self._frozen = [(name, param) for name, param, _ in self._dtypes if not param.requires_grad]

    def check(self) -> None:
        """Raise EngineError for a parameter that was unfrozen, or cast."""
        for name, param in self._frozen:
            if param.requires_grad:
                raise EngineError(
                    f"the parameter {name} was unfrozen after initialize(), which would not train it",
                    hint="unfreeze it before, and give it a learning rate of 0 as long as it is to stay",
                )
        for name, param, dtype in self._dtypes:
            if param.dtype != dtype:
                raise EngineError(
                    f"the parameter {name} became {param.dtype} after initialize(), which made it {dtype}",
                    hint='set "fp16" or "bf16" in the config in place of model.half() or model.to(dtype)',
                )


def _shown(name: str) -> str:
    return f"the module {name}" if name else "the model"
