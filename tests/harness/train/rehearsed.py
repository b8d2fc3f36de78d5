"""The same training twice: on ranks that are there, followed, and rehearsed. Functions for `harness.train.forked`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from launcher.planner.rehearsal import RankRehearsal

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
    """Train a model for some steps, and one forward more, as a script does."""
    import launcher

    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    engine, *_ = launcher.initialize(model=model, config=config)
    for _ in range(NUM_STEPS + 1):
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
    rehearsal = Rehearsal(int(rank), int(world_size), int(world_size), NUM_STEPS, {}, backend="gloo")
    os.environ.update(rehearsal.variables())
    with rehearsal.rehearsing():
        train(name, json.loads(config))
    Path(folder, f"rehearsed_{rank}.json").write_text(json.dumps(rehearsal.results().as_json()))
    os._exit(0)


def read(folder: Path, kind: str, rank: int) -> RankRehearsal:
    """Return what `follow` ("real") or `rehearse` ("rehearsed") has written."""
    return RankRehearsal.from_json((folder / f"{kind}_{rank}.json").read_text())
