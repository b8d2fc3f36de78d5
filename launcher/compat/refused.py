"""The parts of DeepSpeed that the built-in engine does not have: their import ends in a sentence that says so."""

from __future__ import annotations

from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

_NO_PARTS_OF_MOE = "no gates and dispatchers apart from their layer: build deepspeed.moe.layer.MoE"
_NO_INFERENCE = "no inference kernels: call deepspeed.initialize() without an optimizer"
_NO_AUTO_SEQUENCE = "no FPDT or AutoSP: use launcher.DistributedAttention with recomputed activations"
_NO_TENSOR = "tensor parallelism is in the config: give tensor_parallel.autotp_size"
_NO_UNIVERSAL = "no universal checkpoints: each of its checkpoints loads at any number of ranks"
_NO_DATA_EFFICIENCY = "no curriculum learning, random-LTD or data sampling: let the script's own loader choose the data"

# Module below `deepspeed` -> what the built-in engine has not, and what to use. Modules inside of these count, too.
REFUSED = {
    "autotuning": 'no autotuner in Python: call "launch estimate"',
    "checkpoint.ds_to_universal": _NO_UNIVERSAL,
    "checkpoint.universal_checkpoint": _NO_UNIVERSAL,
    "compile": "no DeepCompile: call engine.compile()",
    "compression": "no compression: use torch.ao.quantization",
    "elasticity": 'no elastic agent: call "launch --max_restarts"; "elasticity" of the config works',
    "inference": _NO_INFERENCE,
    "io": "no disk writers for scripts: call engine.save_checkpoint()",
    "linear": "no LoRA or quantized layers: use the package peft",
    "model_implementations": _NO_INFERENCE,
    "module_inject": f"no kernels to inject; {_NO_TENSOR}",
    "moe.experts": _NO_PARTS_OF_MOE,
    "moe.mappings": _NO_PARTS_OF_MOE,
    "moe.sharded_moe": _NO_PARTS_OF_MOE,
    "nvme": 'no disk benchmark in Python: call "launch io"',
    "ops.sparse_attention": "no block-sparse attention: use torch.nn.attention.flex_attention",
    "ops.transformer": "no transformer kernels: use torch.nn.functional.scaled_dot_product_attention",
    "runtime.data_pipeline": _NO_DATA_EFFICIENCY,
    "runtime.domino": _NO_TENSOR,
    "runtime.eigenvalue": "no eigenvalues of layers: use the package pyhessian",
    "runtime.hybrid_engine": "no hybrid engine: call model.generate(), which works at stage 3",
    "runtime.pipe.p2p": "no sends between stages for scripts: call engine.train_batch()",
    "runtime.pipe.schedule": 'no schedules in Python: give "schedule" in "pipeline" of the config',
    "runtime.progressive_layer_drop": "no progressive layer drop: drop layers in the model",
    "runtime.quantize": "no quantized training: use torch.ao.quantization",
    "runtime.superoffload": 'no SuperOffload: set "delayed_update" of "offload_optimizer"',
    "runtime.tensor_parallel": _NO_TENSOR,
    "runtime.zenflow": 'no ZenFlow: set "delayed_update" of "offload_optimizer"',
    "sequence.auto_sp": _NO_AUTO_SEQUENCE,
    "sequence.fpdt_layer": _NO_AUTO_SEQUENCE,
}


def spec_of_refused(name: str) -> ModuleSpec | None:
    """Return the spec of a module whose import says what there is instead; None for a module that is not refused."""
    path = name.partition(".")[2]
    return ModuleSpec(name, _Refusal(REFUSED[path]), is_package=True) if path in REFUSED else None


class _Refusal(Loader):
    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system."""

    def exec_module(self, module: ModuleType) -> NoReturn:
        """Refuse. Raises: ImportError."""
        raise ImportError(f"the built-in engine has {self._sentence}, or install DeepSpeed", name=module.__name__)
