"""What `deepspeed.runtime.utils` and `deepspeed.comm` find out from all ranks."""

from __future__ import annotations

from pathlib import Path

from harness.scripts import write
from harness.train.forked import run_ranks

RUN = """
import launcher.compat; launcher.compat.install()
import deepspeed, torch
import deepspeed.comm as dist
from deepspeed.runtime.utils import CheckOverflow, PartitionedTensor
from deepspeed.utils.comms_logging import CommsLogger

try:
    deepspeed.init_distributed(dist_init_required=False)
except AssertionError as error:
    assert "there is no process group" in str(error)
else:
    raise RuntimeError("a group was started, or none is missed")
deepspeed.init_distributed()
rank, group = dist.get_rank(), dist.get_world_group()
whole = torch.arange(22.0).view(11, 2)
part = PartitionedTensor(whole, group)
assert part.local_size() == ((8, 7, 7)[rank],) and torch.equal(part.full(), whole)
again = PartitionedTensor.from_meta(part.to_meta(), part.data(), group)
assert torch.equal(again.full(), whole) and again.full_size() == [11, 2]

param = torch.nn.Parameter(torch.ones(2))
param.grad = torch.tensor([1.0, float("inf") if rank == 1 else 1.0])
check = CheckOverflow([[param]])
assert check.check() and check.has_overflow_serial([param]) == (rank == 1)

ones = torch.ones(2)
dist.inference_all_reduce(ones)
assert ones.tolist() == [3.0, 3.0]

log = CommsLogger()
log.append("all_reduce", "sum", 1.0 + rank, 100)
late = log.log_all(print_log=False, show_straggler=True, return_dict=True)["straggler_analysis"]
assert late == {"sum": {100: float(rank)}}
dist.destroy_process_group()
"""

EXPERTS = """
import launcher.compat; launcher.compat.install()
import deepspeed, torch
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.utils import groups
import deepspeed.comm as dist

deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
shared, expert = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
expert.allreduce = False
for norm_type, norm in ((2, 9.0), (float("inf"), 8.0)):  # of 1, and of 4 and 8 on the two ranks
    shared.grad, expert.grad = torch.tensor([1.0]), torch.tensor([4.0 + 4.0 * rank])
    groups._create_expert_and_data_parallel(2)
    assert groups._get_max_expert_size() == 2
    assert abs(clip_grad_norm_([shared, expert], max_norm=norm / 2, norm_type=norm_type) - norm) < 1e-5
    assert abs(expert.grad - (2.0 + 2.0 * rank)) < 1e-5 and abs(shared.grad - 0.5) < 1e-5
shared.grad = torch.tensor([6.0])
expert.grad = torch.tensor([8.0]) if rank else None  # no token came to the expert of rank 0
assert abs(clip_grad_norm_([shared, expert], max_norm=1.0) - 10.0) < 1e-5
if rank == 0:  # a log that one rank alone has
    dist.configure(enabled=True)
dist.log_summary(show_straggler=True)
torch.distributed.destroy_process_group()
"""


def test_parts_overflows_sums_and_late_ranks(tmp_path: Path) -> None:
    result = run_ranks(tmp_path, 3, write(tmp_path, RUN))
    assert result.code == 0, result.err


def test_the_norm_counts_the_experts_of_all_ranks(tmp_path: Path) -> None:
    result = run_ranks(tmp_path, 2, write(tmp_path, EXPERTS))
    assert result.code == 0, result.err
