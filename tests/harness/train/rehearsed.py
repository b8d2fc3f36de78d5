"""The same training twice: on ranks that are there, followed, and rehearsed. Functions for `harness.train.forked`."""

from __future__ import annotations

import itertools
import json
import os
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import torch
from harness.launch.command import Result
from harness.train.forked import run_ranks
from torch import Tensor, nn

from launcher.planner.rehearsal import Call, RankRehearsal

PRELOAD = "harness.train.rehearsal_imports"
NUM_STEPS = 2
WIDTH, NUM_LAYERS, NUM_SAMPLES = 192, 4, 4


def _mlp() -> tuple[nn.Module, dict[str, Tensor]]:
    layers = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(NUM_LAYERS)
    ]
    return _WithLoss(nn.Sequential(*layers)), {"x": torch.randn(NUM_SAMPLES, WIDTH)}


def _convolutions() -> tuple[nn.Module, dict[str, Tensor]]:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    for _ in range(NUM_LAYERS):
        layers += [nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    return _WithLoss(nn.Sequential(*layers)), {"x": torch.randn(NUM_SAMPLES, 3, 32, 32)}


def _encoder() -> tuple[nn.Module, dict[str, Tensor]]:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    return _WithLoss(nn.TransformerEncoder(layer, NUM_LAYERS)), {"x": torch.randn(NUM_SAMPLES, 64, WIDTH)}


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x.to(next(self.model.parameters()).dtype)).float().pow(2).mean()
        return out


def _of_transformers(name: str, **options: Any) -> Callable[[], tuple[nn.Module, dict[str, Tensor]]]:
    """Return what builds a causal language model of transformers with so many layers and such a width."""

    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        from transformers import AutoConfig, AutoModelForCausalLM

        small = {
            "vocab_size": 512, "hidden_size": WIDTH, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4,
            "intermediate_size": 3 * WIDTH, "max_position_embeddings": 256,
        }  # fmt: skip
        config = AutoConfig.for_model(name, **{**small, **options})
        config.use_cache = False
        ids = torch.randint(0, 512, (NUM_SAMPLES, 64))
        return AutoModelForCausalLM.from_config(config), {"input_ids": ids, "labels": ids}

    return build


GPT2 = {"n_embd": WIDTH, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 256}
MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "mlp": _mlp,
    "convolutions": _convolutions,
    "encoder": _encoder,
    "gpt2": _of_transformers("gpt2", attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **GPT2),
    "llama": _of_transformers("llama", num_key_value_heads=2),
    "qwen3": _of_transformers("qwen3", num_key_value_heads=2, head_dim=48),
    "gemma2": _of_transformers("gemma2", num_key_value_heads=2, head_dim=48),
    "mistral": _of_transformers("mistral", num_key_value_heads=2),
    "phi3": _of_transformers("phi3", num_key_value_heads=2, pad_token_id=0),
    "olmo2": _of_transformers("olmo2", num_key_value_heads=2),
    "opt": _of_transformers("opt", ffn_dim=3 * WIDTH, word_embed_proj_dim=WIDTH, dropout=0.0),
    "mixtral": _of_transformers("mixtral", num_key_value_heads=2, num_local_experts=4),
}


def setting(stage: int, offload: str = "", precision: str = "bf16", **keys: Any) -> dict[str, Any]:
    """Return an engine config. offload: "", "optimizer" or "all", to host memory."""
    zero: dict[str, Any] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": NUM_SAMPLES,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **keys,
    }


def train(name: str, config: dict[str, Any]) -> None:
    """Train a model for some steps."""
    import launcher

    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    engine, *_ = launcher.initialize(model=model, config=config)
    if "pipeline" in config:
        for _ in range(NUM_STEPS):
            engine.train_batch(itertools.repeat(inputs))
        return
    if "sequence_parallel_size" in config:
        inputs = launcher.shard_sequence(inputs)
        inputs["labels"] = inputs["shift_labels"]
    for _ in range(NUM_STEPS * engine.gradient_accumulation_steps()):
        outputs = engine(**inputs)
        engine.backward(outputs if isinstance(outputs, Tensor) else outputs.loss)
        engine.step()
        del outputs


def follow() -> None:
    """Train what `sys.argv` says on real ranks, and write what was found to a file of the rank."""
    from launcher.rehearse.follow import Follower, RealTensors

    name, config, folder = sys.argv[1:4]
    rank, world_size = (int(os.environ[variable]) for variable in ("RANK", "WORLD_SIZE"))
    follower = Follower(RankRehearsal(rank, world_size, world_size), NUM_STEPS)
    with follower.running(RealTensors(follower.ledger)):
        train(name, json.loads(config))
    Path(folder, f"real_{rank}.json").write_text(json.dumps(follower.results().as_json()))


def rehearse() -> None:
    """Rehearse the same as the rank and world that `sys.argv` names."""
    from launcher.rehearse.main import Rehearsal

    name, config, folder, rank, world_size = sys.argv[1:6]
    first = Path(folder, "rehearsed_0.json")  # of a pipeline, the rank that says what its stage returns
    announced = RankRehearsal.from_json(first.read_text()).announced if first.exists() else {}
    rehearsal = Rehearsal(int(rank), int(world_size), int(world_size), NUM_STEPS, announced, backend="gloo")
    os.environ.update(rehearsal.variables())
    with rehearsal.rehearsing():
        train(name, json.loads(config))
    Path(folder, f"rehearsed_{rank}.json").write_text(json.dumps(rehearsal.results().as_json()))
    os._exit(0)


def rehearse_script(
    folder: Path,
    script: Path,
    *arguments: str,
    rank: int,
    world_size: int,
    patch: dict[str, Any] | None = None,
) -> tuple[RankRehearsal, Result]:
    """Rehearse a script as `launch rehearse` does, in a fork; return what was found, and what it printed."""
    wanted = {"world_size": world_size, "gpus_per_node": 8, "num_steps": NUM_STEPS, "rank": rank, "announced": {}}
    return _rehearse_in_fork(folder, wanted, ["script", script, *arguments], patch or {})


def in_forks(folder: Path) -> Callable[..., RankRehearsal]:
    """Return what rehearses one rank after the other in forks, in place of `rehearse.run_rank`."""

    def run(wanted: dict[str, Any], command: Sequence[str], patch: dict[str, Any], *, verbose: bool) -> RankRehearsal:
        return _rehearse_in_fork(folder, wanted, command, patch)[0]

    return run


def _rehearse_in_fork(
    folder: Path, wanted: dict[str, Any], command: Sequence[str | Path], patch: dict[str, Any]
) -> tuple[RankRehearsal, Result]:
    path = folder / f"rank_{wanted['rank']}.json"
    path.write_text(json.dumps(wanted))
    env = {"LAUNCH_REHEARSAL": str(path), "LAUNCH_CONFIG_PATCH": json.dumps(patch)}
    result = run_ranks(folder, 0, rehearse_main, *command, env=env, preload=PRELOAD)
    return RankRehearsal.from_json(path.read_text()), result


def rehearse_main() -> None:
    """Be the process that `launch rehearse` starts, with `sys.argv`."""
    from launcher.rehearse.main import main

    sys.modules["__main__"] = types.ModuleType("__main__")
    vars(sys.modules["__main__"])["__loader__"] = SourceFileLoader("__main__", sys.argv[0])  # as of a script
    main()


def profile() -> None:
    """Train what `sys.argv` says on one rank; print the most bytes by our count and by torch's profiler."""
    from launcher.rehearse.follow import Follower, RealTensors

    name, config = sys.argv[1:3]
    follower = Follower(RankRehearsal(0, 1, 1), NUM_STEPS)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with profiler, follower.running(RealTensors(follower.ledger)):
        train(name, json.loads(config))
    assert profiler.profiler is not None
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    taken = itertools.accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns()))
    counted = max(sum(peak.values()) for peak in follower.results().peaks.values())
    print(json.dumps({"counted": counted, "allocated": max(taken)}))


def rehearse_and_follow(
    folder: Path, name: str, config: dict[str, Any], world_size: int
) -> tuple[RankRehearsal, RankRehearsal]:
    """Return what a rehearsal of the last rank says, and what that rank of a real run does."""
    env = {"LAUNCH_REDUCE_GROUP": "shared"}  # as it is where there are GPUs
    text, last = json.dumps(config), world_size - 1
    real = run_ranks(folder, world_size, follow, name, text, folder, env=env, preload=PRELOAD)
    assert real.code == 0, real.err
    for rank in {0, last} if "pipeline" in config else {last}:
        found = run_ranks(folder, 0, rehearse, name, text, folder, str(rank), str(world_size), env=env, preload=PRELOAD)
        assert found.code == 0, found.err
    return read(folder, "rehearsed", last), read(folder, "real", last)


def collectives_of(found: RankRehearsal) -> list[tuple[str, str, int, str, str, int]]:
    """Return the engine's collectives of a rank, in their order.

    How many tokens go to which expert is guessed in a rehearsal, so the sizes of their exchanges are left out.
    """
    return [
        (call.kind, found.groups[call.group].purpose, _size(call), call.what, call.phase, call.step)
        for call in found.calls
        if call.is_of_engine
    ]


def _size(call: Call) -> int:
    return 0 if "exchange" in call.what else call.num_bytes


def read(folder: Path, kind: str, rank: int) -> RankRehearsal:
    """Return what `follow` ("real") or `rehearse` ("rehearsed") has written."""
    return RankRehearsal.from_json((folder / f"{kind}_{rank}.json").read_text())
