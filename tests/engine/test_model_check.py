"""Models that no stage can train end in one error, before they are touched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import launcher
from launcher.base.errors import EngineError

CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}


def test_a_complex_parameter_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_parameter("turns", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    with pytest.raises(EngineError, match=r"the parameter 0\.turns is complex.*view_as_real"):
        launcher.initialize(model=model, config=CONFIG)
    assert model[0].turns.dtype == torch.complex64  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_module_is_named() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    for model, name in ((nn.Sequential(scripted), "the module 0"), (scripted, "the model")):
        with pytest.raises(EngineError, match=rf"{name} is a scripted module .*the module it was made from"):
            launcher.initialize(model=model, config=CONFIG)
