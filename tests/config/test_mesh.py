"""The mesh equation between keys, ranks and nodes."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.base.errors import ConfigError
from launcher.config.equations import check_nodes, mesh_sizes, solve_batch
from launcher.config.load import load_config
from launcher.config.schema import Config
from launcher.config.schema_parallel import Pipeline

MICRO = {"train_micro_batch_size_per_gpu": 1}


def config_of(**keys: Any) -> Any:
    return load_config({**MICRO, **keys}).config


def test_the_data_axis_takes_the_ranks_that_are_left() -> None:
    assert mesh_sizes(config_of(), 6).shape == (1, 6, 1, 1)
    assert mesh_sizes(config_of(tensor_parallel={"autotp_size": 2}), 6).shape == (1, 3, 1, 2)
    assert mesh_sizes(config_of(tensor_parallel={"autotp_size": 2, "tp": {"tp_size": 2}}), 2).data == 1
    assert mesh_sizes(config_of(expert_parallel={"enabled": True, "autoep_size": 2}), 6).expert == 2
    assert mesh_sizes(config_of(expert_parallel={"autoep_size": 2}), 6).expert == 1
    both = config_of(tensor_parallel={"autotp_size": 4}, data_parallel_size=2)
    assert mesh_sizes(both, 8).equation == "2 (data) × 4 (tensor) = 8"


@pytest.mark.parametrize(
    ("keys", "num_ranks", "message", "hint"),
    [
        (
            {"tensor_parallel": {"autotp_size": 3}},
            8,
            "1 \\(data\\) × 3 \\(tensor\\) = 3 does not divide the 8 ranks of this job",
            "start 6 or 9 ranks",
        ),
        (
            {"tensor_parallel": {"autotp_size": 2}, "data_parallel_size": 2},
            8,
            "2 \\(data\\) × 2 \\(tensor\\) = 4 is not the 8 ranks of this job",
            "start 4 ranks",
        ),
        (
            {"expert_parallel": {"enabled": True, "autoep_size": 4}},
            6,
            "4 ranks of one set of experts do not divide the data axis: 6 \\(data\\) = 6 ranks",
            "use 1, 2, 3 or 6, or start a multiple of 4 ranks",
        ),
        (
            {"expert_parallel": {"enabled": True, "autoep_size": 2}, "tensor_parallel": {"autotp_size": 2}},
            4,
            "experts are sharded over ranks of the data axis alone, and this run has 2 \\(data\\) × 2 \\(tensor\\) = 4",
            "leave the tensor axis out",
        ),
        (
            {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}},
            8,
            "tp_size 4 is not tensor_parallel.autotp_size 2",
            "give autotp_size alone",
        ),
        (
            {"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2},
            6,
            "1 \\(data\\) × 2 \\(sequence\\) × 2 \\(tensor\\) = 4 does not divide the 6 ranks of this job",
            "start 4 or 8 ranks",
        ),
    ],
)
def test_an_equation_that_does_not_hold_is_printed_whole(
    keys: dict[str, Any], num_ranks: int, message: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config({**MICRO, **keys}, world_size=num_ranks)
    assert hint in str(caught.value)


def test_ranks_of_one_layer_stay_on_a_node_unless_it_is_forced() -> None:
    config = config_of(tensor_parallel={"autotp_size": 2})
    check_nodes(config, mesh_sizes(config, 8), [4, 4])
    with pytest.raises(ConfigError, match=r"2 \(tensor\) does not divide the 3 ranks of node 0") as caught:
        check_nodes(config, mesh_sizes(config, 6), [3, 3])
    assert '"tensor_parallel.across_nodes": true' in str(caught.value)
    forced = config_of(tensor_parallel={"autotp_size": 2, "across_nodes": True})
    check_nodes(forced, mesh_sizes(forced, 6), [3, 3])


def test_groups_that_exist_and_the_config_agree_about_a_sequence() -> None:
    given = load_config(MICRO, world_size=4, sequence_parallel_size=2)
    assert (given.config.sequence_parallel_size, given.raw) == (2, MICRO)
    same = {**MICRO, "sequence_parallel_size": 2}
    assert load_config(same, world_size=4, sequence_parallel_size=2).config.sequence_parallel_size == 2
    with pytest.raises(ConfigError, match=r"sequence_parallel_size 2 is not the 4 ranks"):
        load_config(same, world_size=4, sequence_parallel_size=4)


def test_pipelines_send_no_parts_of_sequences() -> None:
    config = Config(pipeline=Pipeline(stages=2), sequence_parallel_size=2)
    with pytest.raises(ConfigError, match="pipeline and sequence parallelism exclude each other"):
        mesh_sizes(config, 4)


def test_the_batch_counts_ranks_with_different_samples() -> None:
    keys = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    load_config({**keys, "tensor_parallel": {"autotp_size": 2}}, world_size=4)
    with pytest.raises(ConfigError, match=r"4 \(ranks\)"):
        load_config(keys, world_size=4)


def test_a_batch_that_counts_all_ranks_as_transformers_does_is_taken_over() -> None:
    keys = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    load_config({**keys, "tensor_parallel": {"autotp_size": 2}}, world_size=4)
    assert solve_batch(8, 2, 1, 2, 2).sizes == (4, 2, 1)
    assert solve_batch(8, 2, 2, 2, 2).sizes == (8, 2, 2)
    with pytest.raises(ConfigError, match="train_batch_size 16"):
        load_config({**keys, "train_batch_size": 16, "tensor_parallel": {"autotp_size": 2}}, world_size=4)


def test_a_size_of_experts_that_are_not_spread_has_no_effect() -> None:
    data = {"train_micro_batch_size_per_gpu": 1, "expert_parallel": {"autoep_size": 2}}
    (notice,) = load_config(data, world_size=4).notices
    assert "expert_parallel.autoep_size 2 has no effect: expert_parallel.enabled is not true" in str(notice)
    data["expert_parallel"] = {"autoep_size": 2, "enabled": True}
    assert load_config(data, world_size=4).notices == ()
