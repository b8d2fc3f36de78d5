"""`launch`: a multi-node launcher with a built-in ZeRO engine.

Importing this package imports nothing else, so that the command line and the node agents start in
milliseconds. Engine names (`launcher.initialize`, ...) load torch the first time they are touched.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers know the name; `typing` itself would cost every rank 5 ms

__version__ = "0.1.0"

# Public name -> module that defines it. The only place to add a public engine name.
_LAZY_NAMES = {
    "EXIT_REQUEUE": "launcher.base.preemption",
    "DistributedAttention": "launcher.parallel.sequence.exchange",
    "Engine": "launcher.engine.engine",
    "JobError": "launcher.base.errors",
    "JobTimeout": "launcher.api.outcome",
    "LayerSpec": "launcher.parallel.pipeline.specs",
    "Options": "launcher.api.parameters",
    "Outcome": "launcher.api.outcome",
    "PipelineModule": "launcher.parallel.pipeline.module",
    "RankFailed": "launcher.api.outcome",
    "Sbatch": "launcher.slurm.script",
    "SlurmJob": "launcher.api.submit",
    "TiedLayerSpec": "launcher.parallel.pipeline.specs",
    "add_config_arguments": "launcher.engine.arguments",
    "heartbeat": "launcher.base.progress",
    "init_distributed": "launcher.comm.groups",
    "initialize": "launcher.engine.build",
    "log": "launcher.journal.rank",
    "phase": "launcher.base.progress",
    "preempted": "launcher.base.preemption",
    "run": "launcher.api.run",
    "sequence_loss": "launcher.parallel.sequence.batch",
    "shard_sequence": "launcher.parallel.sequence.batch",
    "submit": "launcher.api.submit",
    "tp_model_init": "launcher.parallel.tensor.split",
}
# Public modules that are loaded the same way: name -> where it is.
_LAZY_MODULES = {
    "checkpoint": "launcher.checkpoint",
    "checkpointing": "launcher.activation",
    "comm": "launcher.comm",
    "compat": "launcher.compat",
    "moe": "launcher.moe",
    "notebook": "launcher.notebook",
    "zero": "launcher.zero",
}

__all__ = [
    "EXIT_REQUEUE",
    "DistributedAttention",
    "Engine",
    "JobError",
    "JobTimeout",
    "LayerSpec",
    "Options",
    "Outcome",
    "PipelineModule",
    "RankFailed",
    "Sbatch",
    "SlurmJob",
    "TiedLayerSpec",
    "__version__",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "compat",
    "heartbeat",
    "init_distributed",
    "initialize",
    "log",
    "moe",
    "notebook",
    "phase",
    "preempted",
    "run",
    "sequence_loss",
    "shard_sequence",
    "submit",
    "tp_model_init",
    "zero",
]

if TYPE_CHECKING:
    from typing import Any

    from launcher import activation as checkpointing
    from launcher import checkpoint, comm, compat, moe, notebook, zero
    from launcher.api.outcome import JobTimeout, Outcome, RankFailed
    from launcher.api.parameters import Options
    from launcher.api.run import run
    from launcher.api.submit import SlurmJob, submit
    from launcher.base.errors import JobError
    from launcher.base.preemption import EXIT_REQUEUE, preempted
    from launcher.base.progress import heartbeat, phase
    from launcher.comm.groups import init_distributed
    from launcher.engine.arguments import add_config_arguments
    from launcher.engine.build import initialize
    from launcher.engine.engine import Engine
    from launcher.journal.rank import log
    from launcher.parallel.pipeline.module import PipelineModule
    from launcher.parallel.pipeline.specs import LayerSpec, TiedLayerSpec
    from launcher.parallel.sequence.batch import sequence_loss, shard_sequence
    from launcher.parallel.sequence.exchange import DistributedAttention
    from launcher.parallel.tensor.split import tp_model_init
    from launcher.slurm.script import Sbatch


def __getattr__(name: str) -> Any:
    import importlib

    module_name = _LAZY_MODULES.get(name) or _LAZY_NAMES.get(name)
    if module_name is None:
        raise AttributeError(f"module 'launcher' has no attribute {name!r}")
    from launcher.base.progress import phase

    with phase(f"importing launcher.{name}"):  # the engine takes seconds, where torch is slow to load
        module = importlib.import_module(module_name)
    if name in _LAZY_MODULES:
        return module
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY_NAMES) | set(_LAZY_MODULES))
