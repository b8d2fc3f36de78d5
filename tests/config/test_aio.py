"""The `aio` section: when it acts, and what of it never does."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.config.check import check

ACTING = {"block_size": 262144, "queue_depth": 32, "intra_op_parallelism": 4}
ON_DISK = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "NVMe", "nvme_path": "/nvme"}}}


def about_aio(data: dict[str, Any]) -> list[str]:
    checked = check(data, None, for_planning=True)
    assert checked.config is not None
    return [finding.message for finding in checked.notices if finding.path[0] == "aio"]


@pytest.mark.parametrize("zero", [{}, {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}])
def test_without_nvme_each_key_is_said_to_have_no_effect(zero: dict[str, Any]) -> None:
    assert about_aio({**zero, "aio": ACTING}) == [
        f"aio.{name} {value} has no effect: nothing is offloaded to nvme" for name, value in ACTING.items()
    ]


def test_with_nvme_the_keys_act() -> None:
    assert about_aio({**ON_DISK, "aio": ACTING}) == []


@pytest.mark.parametrize("name", ["thread_count", "num_threads"])
def test_the_number_of_threads_has_older_names(name: str) -> None:
    checked = check({**ON_DISK, "aio": {name: 4}}, None, for_planning=True)
    assert checked.config is not None
    assert checked.config.aio.intra_op_parallelism == 4


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("single_submit", True, "each request is one system call of a thread"),
        ("overlap_events", False, "requests never wait for each other"),
        ("use_gds", True, "what is on disk goes through host memory"),
    ],
)
def test_what_never_acts_is_said_with_nvme_too(name: str, value: bool, why: str) -> None:
    (message,) = about_aio({**ON_DISK, "aio": {name: value}})
    assert message == f"aio.{name} {str(value).lower()} has no effect: {why}"
