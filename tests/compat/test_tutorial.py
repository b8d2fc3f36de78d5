"""A script as DeepSpeed's tutorials write them: its own arguments, loader, precision, accelerator, checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from harness.scripts import write
from harness.train.forked import run_ranks

INSTALL = "import launcher.compat; launcher.compat.install()"  # as in ranks that `launch` starts
SCRIPT = """
import argparse

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import RepeatingLoader, log_dist


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=2)
    return deepspeed.add_config_arguments(parser).parse_args()


args = arguments()
deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
get_accelerator().set_device(deepspeed.comm.get_local_rank())
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
samples = [(torch.randn(8), index % 2) for index in range(32)]
parameters = filter(lambda param: param.requires_grad, net.parameters())
engine, optimizer, loader, schedule = deepspeed.initialize(
    args=args, model=net, model_parameters=parameters, training_data=samples
)
device = get_accelerator().device_name(engine.local_rank)
dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.half if engine.fp16_enabled() else None
criterion = torch.nn.CrossEntropyLoss()
log_dist(f"batch {engine.get_batch_info()}", ranks=[0])
batches = iter(RepeatingLoader(loader))
num_applied = 0
for _ in range(args.epochs * len(loader)):
    inputs, labels = (part.to(device) for part in next(batches))
    loss = criterion(engine(inputs.to(dtype)).float(), labels)
    engine.backward(loss)
    engine.step()
    num_applied += engine.was_step_applied()
assert engine.global_steps == num_applied == args.epochs * len(loader) // engine.gradient_accumulation_steps()
engine.save_checkpoint("saved", client_state={"epoch": args.epochs})
_, state = engine.load_checkpoint("saved")
log_dist(f"saved {state['epoch']} {engine.global_steps} {engine.get_lr() == schedule.get_last_lr()}", ranks=[0])
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    "zero_optimization": {"stage": 1},
}


def test_it_runs_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    options = ("--deepspeed", "--deepspeed_config", "ds.json", "--epochs", "2")
    script = write(tmp_path, INSTALL + SCRIPT)
    result = run_ranks(tmp_path, 2, script, *options, env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.code == 0, result.err
    assert "batch (8, 2, 2)" in result.out
    assert "saved 2 8 True" in result.out
