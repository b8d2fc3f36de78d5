"""Ranks that wait for each other end with one sentence on every rank; one that is slow or ahead is left alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from harness import scripts
from harness.train.forked import run_ranks

from launcher.zero.order_watch import Report, held_by_each_other, stuck_exchanges

START = """
    import contextlib, os, sys, time, torch, launcher
    import torch.distributed as dist
    import launcher.zero.order_watch as order_watch
    from harness.train.behind import runs_behind_host
    from launcher.base.timeouts import Timeouts
    from torch.utils.checkpoint import checkpoint

    order_watch.timeouts, order_watch._INTERVAL_S = lambda: Timeouts(order_check_s=0.5), 0.5
    rank = int(os.environ["RANK"])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }

    class Model(torch.nn.Module):
        def __init__(self, sizes=(8, 16, 24, 32)):
            super().__init__()
            self.blocks = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(8, size), torch.nn.Linear(size, 8)) for size in sizes
            )

        def forward(self, x, skipped=-1, recomputed=-1):
            for index, block in enumerate(self.blocks):
                if index != skipped:
                    x = x + (checkpoint(block, x, use_reentrant=True) if index == recomputed else block(x))
            return x.sum()

    def build(*sizes, stage=3):
        config["zero_optimization"]["stage"] = stage
        return launcher.initialize(model=Model(*sizes), config=config)[0]

    def train(engine, *args, num_steps=1):
        for _ in range(num_steps):
            engine.backward(engine(torch.ones(2, 8), *args))
            engine.step()

    def evaluate(engine, num_batches=1):
        engine.eval()
        with torch.no_grad():
            for _ in range(num_batches):
                engine(torch.ones(2, 8))
        engine.train()

    def train_while_rank_0_evaluates():
        engine = build()
        for _ in range(3):
            train(engine)
            if rank == 0:
                evaluate(engine)
"""
PARTED = {
    "a block of another size is skipped": (
        """
    train(build(), 1 if rank else -1)
    """,
        r": the gather of blocks\.1\..* on rank 0; the gather of blocks\.2\..* on rank (1, 2|1|2)",
    ),
    "a block of the same size is skipped": (
        """
    train(build((8, 8, 8)), 1 if rank else -1)
    """,
        r"took different paths",
    ),
    "a recomputed block is skipped": (
        """
    train(build((8, 8)), 1 if rank else -1, 1)
    """,
        r"took different paths",
    ),
    "rank 0 evaluates": (
        """
    train_while_rank_0_evaluates()
    """,
        r"took different paths",
    ),
    "rank 0 evaluates, and the others are in a barrier": (
        """
    engine = build()
    train(engine)
    if rank == 0:
        evaluate(engine)
    dist.barrier()
    """,
        r"each other: rank 0 for the gather of blocks\.0.*; rank 1, 2 for torch\.distributed\.barrier at .*\.py:\d",
    ),
    "rank 0 evaluates behind the host": (
        """
    with runs_behind_host():
        train_while_rank_0_evaluates()
    """,
        r"took different paths",
    ),
    "rank 0 takes a backward more, at stage 2": (
        """
    config["gradient_accumulation_steps"] = 2
    engine = build(stage=2)
    train(engine, num_steps=3 if rank else 4)
    engine.any_rank(False)
    train(engine, num_steps=4)
    """,
        r"wait for each other",
    ),
}


@pytest.mark.parametrize("name", PARTED)
def test_ranks_that_wait_for_each_other_say_so_on_every_rank(name: str, tmp_path: Path) -> None:
    body, sentence = PARTED[name]
    result = run_ranks(tmp_path, 3, scripts.write(tmp_path, f"{START}\n{body}\n    print('not reached')"))
    text = result.out + result.err
    assert (result.code, "not reached" in text) == (1, False), text
    assert len(re.findall(r"ranks took different paths through the model.*", text)) == 3, text
    assert re.search(sentence, text), text
    assert "Connection closed by peer" not in text
    assert ("leaf_module" in text) == ("stage 2" not in name)


LEFT_ALONE = {
    "a rank reads data for long": """
    engine = build()
    for _ in range(2):
        time.sleep(2.5 if rank == 1 else 0)
        train(engine)
    """,
    "rank 0 saves, and the others are in a barrier": """
    engine = build()
    train(engine)
    if rank == 0:
        time.sleep(2.5)
    dist.barrier()
    train(engine)
    """,
    "evaluation of unequal lengths": """
    engine = build()
    train(engine)
    done = 0
    while engine.any_rank(done < 2 + rank):
        time.sleep(1.25 * (rank == 0))
        evaluate(engine)
        done += 1
    train(engine)
    """,
    "evaluation of unequal lengths below stage 3": """
    engine = build(stage=2)
    train(engine)
    for _ in range(rank):
        time.sleep(1.25)
        evaluate(engine)
    engine.any_rank(False)
    train(engine)
    """,
    "a rank computes for long behind the host": """
    with runs_behind_host():
        engine = build()
        for number in range(3):
            engine.backward(engine(torch.ones(2, 8)))
            time.sleep(2.5 if rank == number else 0)
            engine.step()
    """,
    "the watch ends with its group, and keeps no store": """
    import gc, weakref

    engine = build()
    train(engine)
    watch = weakref.ref(order_watch._watches[0])
    engine.destroy()
    del engine
    dist.destroy_process_group()
    while watch() is not None:
        gc.collect()
        time.sleep(0.05)
    """,
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_ranks_that_are_ahead_or_slow_are_left_alone(name: str, tmp_path: Path) -> None:
    result = run_ranks(tmp_path, 3, scripts.write(tmp_path, f"{START}\n{LEFT_ALONE[name]}\n    print('reached')"))
    assert (result.code, result.out.count("reached")) == (0, 3), result.out + result.err
    assert "different paths" not in result.out + result.err


ALONE = """
    import logging
    from pathlib import Path

    engine = launcher.initialize(model=torch.nn.Linear(64, 64), config=config)[0]
    warned = Path("warned")
    logger = logging.getLogger("launcher")
    logger.addHandler(logging.StreamHandler())
    logger.addFilter(lambda record: "waits for rank 0" not in record.getMessage() or warned.touch() is None)
    with torch.no_grad():
        for _ in range(3 + 2 * rank):
            engine(torch.ones(2, 64))
    while not warned.exists():  # rank 0 does something else meanwhile
        time.sleep(0.05)
"""


def test_a_rank_that_generates_longer_than_others_names_synced_gpus(tmp_path: Path) -> None:
    """It warns while the others do something else, and its error says the same where they have ended."""
    result = run_ranks(tmp_path, 2, scripts.write(tmp_path, f"{START}\n{ALONE}"))
    assert result.code == 1
    text = result.out + result.err
    remedy = r".*pass synced_gpus=True to generate\(\)"
    assert re.search("rank 1 waits for rank 0 in a forward without gradients" + remedy, text)
    assert re.search("EngineError: the gather of weight.* has failed: another rank has ended" + remedy, text)


# ---- what proves that ranks wait for each other ----

CHECK_S = 10.0


def waits(needs: dict[str, int], issued: dict[str, int], **more: object) -> Report:
    ranks = {name: [0, 1, 2] for name in needs}
    return replace(Report(1, 0.0, CHECK_S, "", True, needs, ranks, issued, {}), **more)  # type: ignore[arg-type]


GATHERS = waits({"gather": 4}, {"gather": 4, "reduce": 0})
REDUCES = waits({"reduce": 1}, {"gather": 3, "reduce": 1})


def test_a_circle_is_proof() -> None:
    assert held_by_each_other({0: GATHERS, 1: REDUCES}, 3, CHECK_S) == {0, 1}
    assert held_by_each_other({0: GATHERS, 1: REDUCES, 2: REDUCES}, 3, CHECK_S) == {0, 1, 2}


def test_no_circle_is_none() -> None:
    begun = waits({"reduce": 1}, {"gather": 4, "reduce": 1})
    assert held_by_each_other({0: GATHERS}, 3, CHECK_S) == set()  # the others do not wait
    assert held_by_each_other({0: GATHERS, 1: begun}, 3, CHECK_S) == set()  # 1 waits for 0, which waits for 2
    assert held_by_each_other({0: GATHERS, 1: GATHERS, 2: GATHERS}, 3, CHECK_S) == set()  # a slow network
    others = replace(REDUCES, ranks={"reduce": [1, 2]})
    assert held_by_each_other({0: GATHERS, 1: others}, 3, CHECK_S) == set()  # 2 may come, and then 1


def test_a_wait_of_the_script_counts_after_a_longer_time_and_where_all_wait() -> None:
    gathers, script = replace(GATHERS, lasts_s=31.0), waits({}, {"gather": 3, "reduce": 0}, lasts_s=31.0)
    assert held_by_each_other({0: gathers, 1: script, 2: script}, 3, CHECK_S) == {0, 1, 2}
    assert held_by_each_other({0: gathers, 1: script}, 3, CHECK_S) == set()
    assert held_by_each_other({0: GATHERS, 1: script, 2: script}, 3, CHECK_S) == set()
    assert held_by_each_other({0: script, 1: script, 2: script}, 3, CHECK_S) == set()


def test_a_device_holds_its_rank_against_a_host_that_waits() -> None:
    host = waits({"hosts": 2}, {"hosts": 2, "gather": 3})
    device = waits({"gather": 4, "hosts": 1}, {"hosts": 1, "gather": 4}, is_host=False)
    assert held_by_each_other({0: device, 1: host}, 3, CHECK_S) == {0, 1}
    behind = waits({"gather": 3, "hosts": 1}, {"hosts": 1, "gather": 3}, is_host=False)
    assert held_by_each_other({0: behind, 1: host}, 3, CHECK_S) == set()  # its host reads data
    other = waits({"reduce": 1}, {"reduce": 1, "gather": 3}, is_host=False)
    assert held_by_each_other({0: device, 1: other}, 3, CHECK_S) == set()  # both hosts may be about to begin the rest


def test_hosts_that_are_in_different_calls_for_a_minute_are_stuck() -> None:
    name = "3/host_all_reduce_max"
    here, there = (waits({name: number}, {name: number}, lasts_s=61.0, what="[1, 0]") for number in (5, 6))
    assert stuck_exchanges({0: here, 1: there, 2: there}, 60.0) == {
        0: "[1, 0] in call 5",
        1: "[1, 0] in call 6",
        2: "[1, 0] in call 6",
    }
    assert stuck_exchanges({0: here, 1: there}, 60.0) == {}  # rank 2 is slow
    assert stuck_exchanges({0: here, 1: there, 2: replace(there, lasts_s=59.0)}, 60.0) == {}
    gather = waits({"3/all_gather": 5}, {}, lasts_s=61.0)
    assert stuck_exchanges(dict.fromkeys(range(3), gather), 60.0) == {}  # of many bytes
