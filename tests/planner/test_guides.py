"""DeepSpeed's estimators under their own names: the tables of the guides, digit for digit."""

from __future__ import annotations

import pytest
from torch import device, nn

from launcher.planner import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)

T0_3B, T0_3B_LARGEST = 2_783_959_040, 65_798_144
ONE_GPU = """\
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 1 node, 1 GPU per node.
SW: Model with 2783M total params, 65M largest layer params.
  per CPU  |  per GPU |   Options
   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   62.23GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=1
   62.23GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    0.37GB |  46.91GB | offload_param=none, offload_optimizer=none, zero_init=1
   15.56GB |  46.91GB | offload_param=none, offload_optimizer=none, zero_init=0
"""
TWO_GPUS = """\
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 1 node, 2 GPUs per node.
SW: Model with 2783M total params, 65M largest layer params.
  per CPU  |  per GPU |   Options
   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   62.23GB |   2.84GB | offload_param=none, offload_optimizer=cpu , zero_init=1
   62.23GB |   2.84GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    0.74GB |  23.58GB | offload_param=none, offload_optimizer=none, zero_init=1
   31.11GB |  23.58GB | offload_param=none, offload_optimizer=none, zero_init=0
"""


@pytest.mark.parametrize(("num_gpus", "expected"), [(1, ONE_GPU), (2, TWO_GPUS)])
def test_the_tables_of_the_guides(num_gpus: int, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    estimate_zero3_model_states_mem_needs_all_cold(T0_3B, T0_3B_LARGEST, num_gpus_per_node=num_gpus, num_nodes=1)
    assert capsys.readouterr().out == expected


def test_a_live_model_gives_the_same_table_as_its_counts(capsys: pytest.CaptureFixture[str]) -> None:
    with device("meta"):
        model = nn.Sequential(nn.Embedding(65_798, 1000), nn.Linear(1000, 1000), nn.Linear(1000, 1000))
    model[2].weight = model[1].weight  # tied: counted once
    total = 65_798_000 + 1_001_000 + 1000
    estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=2, num_nodes=4)
    live = capsys.readouterr().out
    estimate_zero3_model_states_mem_needs_all_cold(total, 65_798_000, num_gpus_per_node=2, num_nodes=4)
    assert live == capsys.readouterr().out
    assert "HW: Setup with 4 nodes, 2 GPUs per node." in live
    estimate_zero2_model_states_mem_needs_all_live(model, 2, 4)
    live = capsys.readouterr().out
    estimate_zero2_model_states_mem_needs_all_cold(total, 2, 4)
    assert live == capsys.readouterr().out


def test_stage_2(capsys: pytest.CaptureFixture[str]) -> None:
    estimate_zero2_model_states_mem_needs_all_cold(2**30, num_gpus_per_node=8)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "SW: Model with 1073M total params.",
        "  per CPU  |  per GPU |   Options",
        "   48.00GB |   2.00GB | offload_optimizer=cpu ",
        "   48.00GB |   4.25GB | offload_optimizer=none",
    ]


def test_several_nodes_share_the_host_memory() -> None:
    alone = estimate_zero3_model_states_mem_needs(10**9, 10**7, 8, 1)
    four = estimate_zero3_model_states_mem_needs(10**9, 10**7, 8, 4)
    assert four[0] * 4 == alone[0]
    assert four[2] == alone[2] == 4 * 10**7
    # Without zero.Init each of 8 ranks builds the whole model: 32 bytes a parameter are more than 18 / 4.
    assert estimate_zero3_model_states_mem_needs(10**9, 10**7, 8, 4, zero_init=False)[0] == 48 * 10**9
