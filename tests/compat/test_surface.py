"""What transformers, accelerate and scripts use of `deepspeed`, name by name, in one process that trains one step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.child import run_python

# Each statement is run by itself in the child, which has an engine at stage 3; it fails by raising.
WORKS = [
    # ---- imports, as they are written ----
    "import deepspeed; assert deepspeed.__version__ == importlib.metadata.version('deepspeed')",
    "assert deepspeed.__spec__.name == 'deepspeed' and deepspeed.__path__ and deepspeed.__package__ == 'deepspeed'",
    "from deepspeed import DeepSpeedEngine, add_config_arguments, checkpointing, init_distributed, initialize, zero",
    "import deepspeed.comm as dist; assert dist is deepspeed.comm and dist.is_initialized()",
    "from deepspeed.runtime.engine import DeepSpeedEngine as other; assert other is deepspeed.DeepSpeedEngine",
    "from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint, configure",
    "import deepspeed.runtime.zero.partition_parameters as pp; assert pp is deepspeed.zero.partition_parameters",
    "from deepspeed.runtime.zero import Init; assert Init is deepspeed.zero.Init is launcher.zero.Init",
    "assert deepspeed.DeepSpeedEngine is launcher.Engine and deepspeed.initialize.__wrapped__ is launcher.initialize",
    "assert not any(name.startswith('launcher.compat.deepspeed') for name in sys.modules)  # nothing exists twice",
    # ---- comm ----
    "assert (dist.get_rank(), dist.get_world_size(), dist.get_local_rank()) == (0, 1, 0)",
    "dist.init_distributed(dist_backend=None, auto_mpi_discovery=False, timeout=datetime.timedelta(minutes=1))",
    "dist.barrier(); x = torch.ones(2); dist.all_reduce(x, op=dist.ReduceOp.SUM); dist.broadcast(x, src=0)",
    "assert dist.get_world_group() is torch.distributed.group.WORLD",
    # ---- zero ----
    "p = torch.nn.Parameter(torch.ones(2))",
    "with deepspeed.zero.GatheredParameters([p, None], modifier_rank=0): p.data.zero_()",
    "with deepspeed.zero.GatheredParameters(p): pass",
    "with deepspeed.zero.GatheredParameters((q for q in []), modifier_rank=None, fwd_module=None, enabled=True): pass",
    "with deepspeed.zero.Init(config_dict_or_path={'zero_optimization': {'stage': 3}, 'bf16': {'enabled': True}}):\n"
    "    layer = torch.nn.Linear(2, 2)\nassert layer.weight.dtype == torch.bfloat16",
    "deepspeed.zero.register_external_parameter(layer, p)",
    "saved = pp.zero_wrapper_for_fp_tensor_constructor; pp.zero_wrapper_for_fp_tensor_constructor = print\n"
    "pp.zero_wrapper_for_fp_tensor_constructor = saved",
    "assert pp.zero_wrapper_for_fp_tensor_constructor(torch.ones, torch.bfloat16)(2).dtype == torch.float32",
    "assert pp._orig_torch_arange(2).tolist() == [0, 1]",
    "assert pp.get_accelerator().device_name(0) == 'cpu'",
    # ---- schedules ----
    "assert set(deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES) == "
    "{'LRRangeTest', 'OneCycle', 'WarmupLR', 'WarmupDecayLR', 'WarmupCosineLR'}",
    "assert all(getattr(deepspeed.runtime.lr_schedules, name).__name__ == name "
    "for name in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES)",
    # ---- accelerator, utils, checkpoint, launcher ----
    "from deepspeed.accelerator import get_accelerator; assert get_accelerator().current_device_name() == 'cpu'",
    "assert get_accelerator() is get_accelerator() and get_accelerator().communication_backend_name() == 'gloo'",
    "get_accelerator().synchronize(); assert not hasattr(get_accelerator(), 'no_such_function')",
    "deepspeed.utils.logger.setLevel(30); deepspeed.utils.logger.setLevel(20)",
    "from deepspeed.utils import log_dist; log_dist('hello', ranks=[0])",
    "m = torch.nn.Sequential(torch.nn.Linear(2, 2))",
    "assert deepspeed.utils.set_z3_leaf_modules(m, [torch.nn.Linear]) == [m[0]]",
    "from deepspeed.utils import groups; assert groups._get_sequence_parallel_world_size() == 1",
    "assert groups._get_sequence_parallel_rank() == 0 == groups._get_data_parallel_rank()",
    "from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint",
    "from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME as name; assert name == '.deepspeed_env'",
    "from deepspeed.checkpoint.utils import clone_tensors_for_torch_save as clone",
    "whole = torch.arange(4.0); part = whole[:2]\ncopy = clone(collections.OrderedDict(a=part, b=[part, 3]))\n"
    "assert type(copy) is collections.OrderedDict and copy['a'].tolist() == [0, 1] and copy['b'][0] is copy['a']\n"
    "assert copy['a'].untyped_storage().nbytes() == 8 and copy['a'] is not part",
    "deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args(['--deepspeed', 'c.json'])",
    # ---- the engine ----
    "assert isinstance(engine, torch.nn.Module) and isinstance(engine, deepspeed.DeepSpeedEngine)",
    "assert engine.module is model and engine._modules and list(engine.modules()) and list(engine.named_parameters())",
    "assert engine.config is not None and engine.config.get('zero_optimization', {}).get('stage') == 3",
    "assert engine.device == torch.device('cpu') and engine.train() is engine and engine.eval() is engine",
    "engine.train(); engine.set_gradient_accumulation_boundary(is_boundary=True)",
    "engine.backward(engine(torch.ones(2, 4)).sum(), scale_wrt_gas=False); engine.step()",
    "assert engine.get_global_grad_norm() > 0 and engine.global_steps == 1; engine.zero_grad()",
    "assert 'exclude_frozen_parameters' in inspect.signature(engine.save_checkpoint).parameters",
    "assert {'load_module_strict', 'load_optimizer_states', 'load_lr_scheduler_states'} <= "
    "set(inspect.signature(engine.load_checkpoint).parameters)",
    "engine.save_checkpoint('saved', 'pytorch_model'); assert engine.load_checkpoint('saved', 'pytorch_model')[0]",
    "assert engine.zero_gather_16bit_weights_on_model_save() is True",
    "assert engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)['weight'].shape == (1, 4)",
    "state = engine._consolidated_16bit_state_dict(); assert state['weight'].shape == (1, 4) and len(state) == 2",
    "engine.compile(backend='eager', compile_kwargs={'dynamic': False}); engine(torch.ones(2, 4))",
    "assert model._compiled_call_impl is not None and engine._compiled_call_impl is None",
    "assert engine.in_features == 4  # the model's",
    # ---- what comes with it ----
    "assert optimizer.param_groups[0]['lr'] == 0.1 and optimizer.overflow is False and optimizer.optimizer is not None",
    "assert 'lr' in optimizer.defaults and optimizer.state is not None",
    "optimizer.load_state_dict(optimizer.state_dict())",
    "assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR) and scheduler.get_last_lr() == [0.1]",
    "scheduler.load_state_dict(scheduler.state_dict())",
    "engine.destroy()",
]
# Statement -> the error's class, and words of it.
REFUSED = {
    "engine.no_such_name": (
        "AttributeError",
        "neither Engine nor the model in it, Linear, has an attribute 'no_such_name'",
    ),
    "deepspeed.no_such_name": ("AttributeError", "the built-in engine of launch"),
    "deepspeed.moe": ("AttributeError", "the built-in engine of launch"),
    "import deepspeed.no_such_module": ("ModuleNotFoundError", "deepspeed.no_such_module"),
    "from deepspeed.moe.layer import MoE": ("ImportError", "no expert parallelism"),
    "from deepspeed.pipe import PipelineModule": ("ImportError", "no pipeline parallelism"),
    "from deepspeed import pipe": ("ImportError", "no pipeline parallelism"),
    "import deepspeed.inference": ("ImportError", "no inference kernels"),
    "from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF": (
        "ImportError",
        "no sequence parallelism",
    ),
    "deepspeed.tp_model_init(model=model, tp_size=2, dtype=torch.float32, config={})": (
        "EngineError",
        "no tensor parallelism",
    ),
    "deepspeed.init_inference(model)": ("EngineError", "no inference kernels"),
    "deepspeed.utils.groups._get_sequence_parallel_group()": ("EngineError", "no group of sequence parallelism"),
    "deepspeed.ops.adam.FusedAdam([p], bias_correction=False)": ("EngineError", "bias_correction"),
    "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad([p], adamw_mode=True)": ("EngineError", "no decoupled weight decay"),
    "deepspeed.initialize(model=model, config={}, mpu=3)": ("EngineError", "mpu"),
    "engine.compile(schedule=[])": ("EngineError", "schedule"),
}
RUN = """
import launcher.compat; launcher.compat.install()
import argparse, collections, datetime, importlib.metadata, inspect, json, sys
import deepspeed, launcher, torch

deepspeed.init_distributed()
model = torch.nn.Linear(4, 1)
config = {
    "train_micro_batch_size_per_gpu": 2, "steps_per_print": float("inf"), "fp16": {"enabled": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {
        "stage": 3, "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {"device": "none", "nvme_path": None},
    },
}
engine, optimizer, _, scheduler = deepspeed.initialize(
    model=model, config_params=config, model_parameters=(p for p in model.parameters()),
    lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
)
names, found = globals(), {}
for statement in json.load(open("statements.json")):
    try:
        exec(statement, names)
        found[statement] = None
    except Exception as error:
        found[statement] = [type(error).__name__, str(error)]
json.dump(found, open("found.json", "w"))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each statement has raised."""
    folder = tmp_path_factory.mktemp("surface")
    *before_the_end, the_end = WORKS
    (folder / "statements.json").write_text(json.dumps([*before_the_end, *REFUSED, the_end]))
    result = run_python(folder, RUN, env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 0, result.stderr
    loaded: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return loaded


@pytest.mark.parametrize("statement", WORKS)
def test_it_works(found: dict[str, Any], statement: str) -> None:
    assert found[statement] is None


@pytest.mark.parametrize("statement", REFUSED)
def test_it_is_refused_in_one_sentence(found: dict[str, Any], statement: str) -> None:
    kind, words = REFUSED[statement]
    assert found[statement] is not None
    assert found[statement][0] == kind
    assert words in found[statement][1]


SCHEDULES = """
import launcher.compat; launcher.compat.install()
import torch
from deepspeed.runtime.lr_schedules import WarmupDecayLR, WarmupLR
from launcher.optim.schedules import build_schedule

def rates(schedule):
    found = []
    for _ in range(6):
        found.append(schedule.get_last_lr()[0])
        schedule.step()
    return found

def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.3)

params = {"total_num_steps": 5, "warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 2}
expected = rates(build_schedule("WarmupDecayLR", params, [{"lr": 0.3}], 0.3))
sgd = optimizer()
schedule = WarmupDecayLR(sgd, 5, 0.0, 0.1, warmup_num_steps=2)
assert rates(schedule) == expected and sgd.param_groups[0]["lr"] == schedule.get_last_lr()[0]
assert WarmupLR(optimizer(), 0.0, 0.1, 4, "linear", 3).last_batch_iteration == 3
try:
    WarmupLR(optimizer(), no_such=1)
except Exception as error:
    assert "no_such" in str(error), error
else:
    raise AssertionError
"""


def test_schedules_can_be_made_from_an_optimizer(tmp_path: Path) -> None:
    result = run_python(tmp_path, SCHEDULES)
    assert result.returncode == 0, result.stderr


OPTIMIZERS = """
import launcher.compat; launcher.compat.install()
import sys
import deepspeed, torch
from launcher.optim.lion import Lion

def trained(make):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    client = make(model)
    config = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": 0, "zero_optimization": {"stage": 1}}
    schedule = torch.optim.lr_scheduler.LambdaLR(client, lambda step: 1 / (1 + step))
    engine, optimizer, _, returned = deepspeed.initialize(model=model, config_params=config, optimizer=client)
    assert returned is None and optimizer.param_groups is client.param_groups
    for step in range(3):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
        schedule.step()
    name = optimizer.optimizer.name
    engine.destroy()
    return name, model.weight.detach().clone()

def groups(model):
    return [{"params": [model.weight], "lr": 0.05}, {"params": [model.bias], "weight_decay": 0.0}]

ops, optim = deepspeed.ops, torch.optim
adam, adagrad, lion = ops.adam, ops.adagrad.DeepSpeedCPUAdagrad, ops.lion.DeepSpeedCPULion
pairs = [
    (
        lambda m: adam.DeepSpeedCPUAdam(groups(m), lr=0.1, weight_decay=0.2),
        lambda m: optim.AdamW(groups(m), lr=0.1, weight_decay=0.2),
    ),
    (
        lambda m: adam.DeepSpeedCPUAdam(optim.Adam(groups(m), lr=0.1, weight_decay=0.2).param_groups, adamw_mode=False),
        lambda m: optim.Adam(groups(m), lr=0.1, weight_decay=0.2),
    ),
    (
        lambda m: adam.DeepSpeedCPUAdam(optim.AdamW(groups(m), lr=0.1).param_groups, lr=0.1, adamw_mode=True),
        lambda m: optim.AdamW(groups(m), lr=0.1),
    ),
    (lambda m: adam.FusedAdam(m.parameters(), lr=0.1), lambda m: optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.0)),
    (
        lambda m: adagrad(optim.Adagrad(groups(m), lr=0.1).param_groups, lr=0.1, adamw_mode=False),
        lambda m: optim.Adagrad(groups(m), lr=0.1),
    ),
    (lambda m: lion(groups(m), lr=0.1), lambda m: Lion(groups(m), lr=0.1)),
    (lambda m: ops.lion.FusedLion(m.parameters(), lr=0.1), lambda m: Lion(m.parameters(), lr=0.1)),
]
for ours, reference in pairs:
    (name, weight), (other_name, other) = trained(ours), trained(reference)
    assert name == other_name, (name, other_name)
    assert torch.equal(weight, other), (name, weight, other)

class Mine(adam.DeepSpeedCPUAdam):
    pass

try:
    trained(lambda m: Mine(m.parameters()))
except Exception as error:
    assert "Mine is untested" in str(error), error
else:
    raise AssertionError
"""


def test_the_engine_takes_the_optimizers_over(tmp_path: Path) -> None:
    result = run_python(tmp_path, OPTIMIZERS, env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 0, result.stderr
