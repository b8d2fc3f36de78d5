"""An engine starts without torch's compiler and without Triton, and leaves torch as it was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from harness import scripts
from harness.launch.command import run_launch

from launcher.comm.torch_internals import without_dynamo

SCRIPT = """
    import sys
    import torch
    from torch import nn
    import launcher

    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine = launcher.initialize(model=nn.Linear(4, 1), config=config)[0]
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    print("LOADED", sorted({"torch._dynamo", "triton"} & set(sys.modules)))
    print("COMPILED", torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())
"""


@pytest.mark.long
def test_a_step_needs_neither_compiler_and_compiling_works_afterwards(tmp_path: Path) -> None:
    result = run_launch(tmp_path, scripts.write(tmp_path, SCRIPT))
    assert result.code == 0, result.err
    assert "LOADED []" in result.out
    assert "COMPILED 2.0" in result.out


def test_torch_is_left_as_it_was() -> None:
    function = torch.optim.Optimizer.add_param_group.__wrapped__  # type: ignore[attr-defined]
    before = dict(vars(function))
    hidden = sys.modules.pop("torch._dynamo", None)
    try:
        with without_dynamo():
            assert hasattr(function, "__dynamo_disable")
    finally:
        if hidden is not None:
            sys.modules["torch._dynamo"] = hidden
    assert vars(function) == before
