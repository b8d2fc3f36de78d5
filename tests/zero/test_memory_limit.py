"""A model that is larger than the memory each rank may use."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import Launch
from harness.launch.control_groups import memory_groups
from harness.needs import need

WIDTH, LAYERS, NUM_RANKS = 1024, 40, 4
PARAM_BYTES = LAYERS * WIDTH * WIDTH * 4  # 168 MB

SCRIPT = """
    import os, sys
    from pathlib import Path
    import torch
    from torch import nn
    import launcher

    WIDTH, LAYERS = map(int, sys.argv[2:4])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

        def forward(self, x):
            for layer in self.layers:
                x = x + 0.1 * torch.tanh(layer(x))
            return x.square().mean()

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "zero_optimization": {
            "stage": 3,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": WIDTH * WIDTH,
        },
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    launcher.init_distributed()
    torch.distributed.barrier()
    group = sys.argv[4:][int(os.environ["RANK"])]
    Path(group, "cgroup.procs").write_text(str(os.getpid()))  # what has been loaded so far is not counted
    if sys.argv[1] == "whole":
        Model()
        sys.exit("the limit does not bind")
    with launcher.zero.Init(config_dict_or_path=config):
        model = Model()
    engine = launcher.initialize(model=model, config=config)[0]
    x = torch.ones(1, WIDTH)
    loss = engine(x)
    engine.backward(loss)
    engine.step()
    losses = [loss.item()]
    engine.eval()
    with torch.no_grad():
        losses.append(engine(x).item())
    print("LOSSES", *losses)
    assert losses[-1] < losses[0]
"""


@pytest.mark.parametrize(
    "how", [pytest.param("sharded", marks=pytest.mark.long), pytest.param("whole", marks=pytest.mark.soak)]
)
def test_a_model_larger_than_a_rank_may_hold(tmp_path: Path, how: str) -> None:
    script = scripts.write(tmp_path, SCRIPT)
    with memory_groups(NUM_RANKS, PARAM_BYTES * 8 // 10) as groups:
        if not groups:
            need("no control group with a memory limit can be made here")
        # Without it glibc keeps the places of freed gradients: docs/troubleshooting.md, "Memory of a rank on a CPU".
        exact = ("--env", "MALLOC_MMAP_THRESHOLD_=1048576")
        arguments = (*exact, "--num_gpus", str(NUM_RANKS), script, how, str(WIDTH), str(LAYERS), *groups)
        result = Launch(tmp_path, *arguments).wait(240)  # most of it is spent in gloo
    if how == "whole":
        assert result.code == 137, "built whole, the model does not fit"
        assert "out of memory" in result.err
    else:
        assert result.code == 0, result.err
        assert result.out.count("LOSSES") == NUM_RANKS
