"""Runs of the Trainer and of accelerate whose ranks have parts of sequences, for `harness.train.hf_job`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.train.hf_job import begin_anew
from huggingface.trainer_cases import Log, config_of, log_of, train, trainer_of


def model_of(num_key_heads: int = 1) -> Any:
    """Return a causal language model with fewer heads of keys than ranks, the same on every rank."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_key_value_heads=num_key_heads, vocab_size=128, attn_implementation="sdpa")
    )


def uneven_rows(num_rows: int = 64) -> list[dict[str, Any]]:
    """Return examples of 16 tokens, of which the last 5 have labels: the first part of each has none."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 128, (num_rows, 16), generator=generator)
    labels = tokens.clone()
    labels[:, :11] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def parallelism() -> Any:
    """Return accelerate's parallelism of two ranks of one sequence."""
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    return ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler)


def options_of(num_parts: int) -> dict[str, Any]:
    """Return the options of a Trainer that has as many samples in a step as two ranks of one micro-batch."""
    return {"train_dataset": uneven_rows(), "gradient_accumulation_steps": num_parts, "max_grad_norm": 0.5}


def case_sequence_parallel(folder: Path) -> dict[str, Log]:
    """Return the logs of plain ranks, and of ranks that have parts of the samples of both, one batch after another."""
    found = {"plain": log_of(train(folder, None, model_of(), **options_of(1)))}
    options = {**options_of(2), "parallelism_config": parallelism()}
    found["stage 1"] = log_of(train(folder, config_of(1), model_of(), **options))
    recomputed = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    found["stage 3, recomputed"] = log_of(train(folder, config_of(3), model_of(), **options, **recomputed))
    return found


def case_sequence_parallel_resumed(folder: Path) -> dict[str, list[float]]:
    """Return the losses of a whole run, and of one that began again in the middle of its epoch."""
    options = {**options_of(2), "parallelism_config": parallelism(), "save_strategy": "steps", "save_steps": 2}
    whole = train(folder / "run", config_of(2), model_of(), **options)
    again = trainer_of(folder / "run", config_of(2), model_of(), **{**options, "save_strategy": "no"})
    again.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    return {"whole": whole.micro_losses, "resumed": again.micro_losses}


def case_sequence_parallel_evaluated(folder: Path) -> dict[str, list[float]]:
    """Return the losses of an evaluation, in which each rank has samples of its own, and of the model alone."""
    import torch

    options = {**options_of(1), "parallelism_config": parallelism(), "max_steps": 1, "learning_rate": 0.0}
    trainer = train(folder, config_of(2), model_of(), **options)
    found = trainer.evaluate(uneven_rows(8))["eval_loss"]
    rows = uneven_rows(8)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {"trainer": [found], "alone": [model_of()(**batch).loss.item()]}


def case_accelerate_sequence_parallel(folder: Path) -> dict[str, list[float]]:
    """Return the losses of a loop of accelerate's own, as its documentation has it, and of torch alone."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin
    from torch.utils.data import DataLoader

    def steps(model: Any, optimizer: Any, batches: Any, mean: Any, backward: Any) -> list[float]:
        losses = []
        for batch in batches:
            optimizer.zero_grad()
            labels = batch.pop("shift_labels")
            logits = model(**batch).logits
            loss = mean(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), labels)
            backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses

    def gathered(loss: Any, labels: Any) -> Any:
        from deepspeed.utils import groups

        group, count = groups._get_sequence_parallel_group(), (labels != -100).sum()
        losses = torch.distributed.nn.functional.all_gather(loss, group=group)
        counts = torch.distributed.nn.functional.all_gather(count, group=group)
        total = sum(each * number for each, number in zip(losses, counts, strict=True) if number > 0)
        return total / max(sum(counts), 1)

    rows, model = uneven_rows(16), model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    whole = []
    for batch in DataLoader(rows, batch_size=2):
        labels = torch.nn.functional.pad(batch.pop("labels"), (0, 1), value=-100)[:, 1:]
        whole.append({**batch, "shift_labels": labels})
    found = {"alone": steps(model, optimizer, whole, lambda loss, _: loss, lambda loss: loss.backward())}
    begin_anew()
    plugin = DeepSpeedPlugin(hf_ds_config={**config_of(3), "gradient_clipping": 0.0})
    accelerator = Accelerator(deepspeed_plugin=plugin, parallelism_config=parallelism())
    model = model_of().eval()  # as from_pretrained returns it
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
    found["accelerate"] = steps(model, optimizer, loader, gathered, accelerator.backward)
    return found


def case_every_stage(folder: Path) -> dict[str, list[float]]:
    """Return the losses of 20 steps alone, and of every stage on four ranks, of which two or four share sequences."""
    import torch

    import launcher

    rows, num_steps = uneven_rows(16), 20
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def samples(step: int, first: int, size: int) -> dict[str, Any]:
        places = [(4 * step + first + number) % len(rows) for number in range(size)]
        return {name: value[places] for name, value in batch.items()}

    model, found = model_of(), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for step in range(num_steps):
        loss = model(**samples(step, 0, 4)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found["alone"] = losses
    for stage, size in ((0, 2), (1, 2), (2, 2), (3, 4)):
        config = {
            "train_batch_size": 4,
            "gradient_clipping": 0.5,
            "steps_per_print": 0,
            "sequence_parallel_size": size,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        engine, losses = launcher.initialize(model=model_of(), config=config)[0], []
        share = engine.train_micro_batch_size_per_gpu()
        for step in range(num_steps):
            own = launcher.shard_sequence(samples(step, engine.get_data_parallel_rank() * share, share))
            loss = engine(**own, labels=own["shift_labels"]).loss
            loss = launcher.sequence_loss(loss, own["shift_labels"])
            engine.backward(loss)
            engine.step()
            mean = loss.detach().double()
            torch.distributed.all_reduce(mean)
            losses.append(mean.item() / engine.world_size)
        found[f"stage {stage}, {size} ranks of a sequence"] = losses
        engine.destroy()
    return found


def case_masks(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return loss and norm of the gradients of one step, alone and on parts of sequences, by model and batch."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    import launcher

    def sliding() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = MistralConfig(**sizes, num_key_value_heads=2, vocab_size=128, sliding_window=5)
        return MistralForCausalLM._from_config(config, attn_implementation="sdpa")

    found = {}
    for kind, make in (("full", model_of), ("sliding", sliding)):
        for name, batch in _batches().items():
            model = make().train()
            alone = model(**batch, use_cache=False).loss
            alone.backward()
            norm = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
            model = make()
            engine = launcher.initialize(model=model, config=_sgd())[0]
            own = launcher.shard_sequence(batch)
            loss = engine(own.pop("input_ids"), labels=own["shift_labels"], **own).loss
            loss = launcher.sequence_loss(loss, own["shift_labels"])
            engine.backward(loss)
            engine.step()
            pairs = {"alone": [alone.item(), norm.item()], "parts": [loss.item(), engine.get_global_grad_norm()]}
            found[f"{kind}, {name}"] = pairs
            engine.destroy()
            again = model(**batch, use_cache=False).loss  # the engine has left the model as it was
            assert abs(again.item() - alone.item()) < 0.1
    return found


def _sgd() -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "sequence_parallel_size": 2,
        "steps_per_print": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
    }


def _batches() -> dict[str, dict[str, Any]]:
    import torch

    tokens = torch.randint(1, 128, (2, 16), generator=torch.Generator().manual_seed(3))
    labels = tokens.clone()
    labels[:, :9] = -100
    whole = {"input_ids": tokens, "labels": labels}
    left, right, behind = torch.ones_like(tokens), torch.ones_like(tokens), labels.clone()
    left[0, :3], right[1, -3:], behind[1, -3:] = 0, 0, -100
    return {
        "whole": whole,
        "padding in front": {**whole, "attention_mask": left},
        "padding that predicts": {**whole, "labels": tokens.masked_fill(left == 0, -100), "attention_mask": left},
        "padding behind": {**whole, "labels": behind, "attention_mask": right},
        "two documents": {**whole, "position_ids": torch.cat([torch.arange(6), torch.arange(10)]).repeat(2, 1)},
    }


def case_reads(folder: Path) -> dict[str, list[int]]:
    """Return how often a forward gathers, and how often its host waits for a device, by what positions it gets."""
    from unittest import mock

    import torch.distributed as dist
    from harness.train.behind import Waits

    import launcher
    from launcher.comm.communicator import Communicator
    from launcher.compat.ulysses import SequenceLoader

    engine = launcher.initialize(model=model_of(), config=_sgd())[0]
    whole, documents = _batches()["whole"], _batches()["two documents"]
    part = launcher.shard_sequence(whole)
    engine(**part)  # the first forward looks at the batch
    changed = launcher.shard_sequence(whole)
    changed["position_ids"] += 1

    def loaded(batch: dict[str, Any]) -> dict[str, Any]:
        group: Any = dist.group.WORLD
        return next(iter(SequenceLoader([batch], group.rank(), group, group.size())))

    found, gather_rows = {}, Communicator.gather_rows
    for name, given in {
        "made here": part,
        "made by a loader": loaded(whole),
        "none": {**part, "position_ids": None},
        "a copy": {**part, "position_ids": part["position_ids"].clone()},
        "changed in place": changed,
        "two documents": launcher.shard_sequence(documents),
        "two documents of a loader": loaded(documents),
    }.items():
        waits = Waits()
        counted = mock.patch.object(Communicator, "gather_rows", autospec=True, side_effect=gather_rows)
        with counted as gathers, waits.counting():
            engine(**given)
        found[name] = [gathers.call_count, waits.counts.total()]
    engine.destroy()
    return found


def case_both_directions(folder: Path) -> dict[str, list[float]]:
    """Return loss and norm of the gradients of a model that sees both ways, within a window and past padding."""
    import torch
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    import launcher

    def make() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
        tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
        config = ModernBertConfig(**sizes, **tokens, vocab_size=128, local_attention=6, global_attn_every_n_layers=3)
        return ModernBertForMaskedLM._from_config(config, attn_implementation="sdpa")

    batch = _batches()["padding behind"]
    model = make().train()
    alone = model(**batch).loss
    alone.backward()
    norm = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
    engine = launcher.initialize(model=make(), config=_sgd())[0]
    own = launcher.shard_sequence(batch, shifts_labels=False)
    loss = launcher.sequence_loss(engine(**own).loss, own["labels"])
    engine.backward(loss)
    engine.step()
    found = {"alone": [alone.item(), norm.item()], "parts": [loss.item(), engine.get_global_grad_norm()]}
    engine.destroy()
    return found


def case_own_positions(folder: Path) -> dict[str, tuple[str, list[float]]]:
    """Return what is said of positions that are not the model's own, and losses of those: alone, and on parts."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM, RobertaConfig, RobertaForMaskedLM

    import launcher

    sizes = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    roberta = RobertaConfig(**sizes, intermediate_size=48, max_position_embeddings=32, pad_token_id=1)
    opt = OPTConfig(**sizes, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=32)
    behind, front = _batches()["padding behind"], _batches()["padding that predicts"]
    mask = front["attention_mask"]
    behind["input_ids"] = behind["input_ids"].clamp(min=2).masked_fill(behind["attention_mask"] == 0, 1)
    counted = (behind["attention_mask"].cumsum(-1) * behind["attention_mask"] + 1, mask.cumsum(-1) * mask - 1)
    found = {}
    for name, kind, config, batch, positions in (
        ("roberta", RobertaForMaskedLM, roberta, behind, counted[0]),
        ("opt", OPTForCausalLM, opt, front, counted[1]),
    ):
        torch.manual_seed(0)
        model = kind._from_config(config, attn_implementation="sdpa").eval()
        alone = model(**batch).loss.item()
        engine = launcher.initialize(model=model, config=_sgd())[0]
        engine.eval()
        shifts = name == "opt"
        own = launcher.shard_sequence({**batch, "position_ids": positions}, shifts_labels=shifts)
        labels = own["shift_labels" if shifts else "labels"]
        loss = launcher.sequence_loss(engine(**{**own, "labels": labels}).loss, labels).item()
        made = launcher.shard_sequence(batch, shifts_labels=shifts)
        said = _said(lambda own=made, labels=labels, engine=engine: engine(**{**own, "labels": labels}))
        found[name] = (said, [alone, loss])
        engine.destroy()
    return found


def case_generates(folder: Path) -> list[list[int]]:
    """Return what a model generates alone, and what each rank of one sequence generates with the same text."""
    import torch

    import launcher

    text = torch.arange(1, 8)[None]
    alone = model_of().generate(text, max_new_tokens=4, do_sample=False)
    engine = launcher.initialize(model=model_of(), config=_sgd())[0]
    engine.eval()
    own = engine.module.generate(text, max_new_tokens=4, do_sample=False)
    engine.destroy()
    return [alone[0].tolist(), own[0].tolist()]


def case_refused(folder: Path) -> dict[str, str]:
    """Return what is said of models and groups that do not fit."""
    import torch
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        MambaConfig,
        MambaForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    import launcher

    sizes = {"n_embd": 32, "n_layer": 1, "vocab_size": 128}
    three = GPT2LMHeadModel._from_config(GPT2Config(n_head=1, **sizes), attn_implementation="sdpa")
    eager = GPT2LMHeadModel._from_config(GPT2Config(n_head=4, **sizes), attn_implementation="eager")
    two_kinds = T5ForConditionalGeneration(
        T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=128)
    )
    recurrent = MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1))
    parallel_state_sp.initialize_sequence_parallel(2)
    wrong = {**_sgd(), "sequence_parallel_size": 1}
    group = parallel_state_sp.get_sequence_parallel_group()
    rank = parallel_state_sp.get_sequence_parallel_rank()

    def short_loader() -> None:
        rows = [{"input_ids": torch.zeros(1, 4, dtype=torch.int64)}] * (1 + rank)
        list(UlyssesSPDataLoaderAdapter(rows, sp_rank=rank, sp_group=group, sp_world_size=2))

    def odd_loader() -> None:
        rows = [{"input_ids": torch.zeros(1, 4 + rank, dtype=torch.int64)}]
        list(UlyssesSPDataLoaderAdapter(rows, sp_rank=rank, sp_group=group, sp_world_size=2))

    register = UlyssesSPAttentionHF.register_with_transformers
    engine = launcher.initialize(model=model_of(), config=_sgd())[0]
    tokens = torch.ones(2, 4, dtype=torch.int64)
    calls = {
        "labels": lambda: engine(input_ids=tokens, labels=tokens),
        "lengths": lambda: engine(input_ids=tokens[:, rank:]),
        "a mask over pairs": lambda: engine(input_ids=tokens, attention_mask=tokens[:, None, :, None]),
        "heads": lambda: launcher.initialize(model=three, config=_sgd()),
        "eager": lambda: launcher.initialize(model=eager, config=_sgd()),
        "recurrent": lambda: launcher.initialize(model=recurrent, config=_sgd()),
        "encoder": lambda: launcher.initialize(model=two_kinds, config=_sgd()),
        "another attention": lambda: register(model_of(), "flash_attention_2", 2),
        "length": lambda: register(model_of(), "sdpa", 2, seq_length=7, seq_length_is_variable=False),
        "config": lambda: launcher.initialize(model=model_of(), config=wrong, mpu=parallel_state_sp),
        "short loader": short_loader,
        "odd loader": odd_loader,
    }
    return {name: _said(call) for name, call in calls.items()}


def _said(call: Any) -> str:
    from launcher.base.errors import LauncherError

    try:
        call()
    except LauncherError as error:
        return str(error)
    return ""
