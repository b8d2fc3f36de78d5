"""Peak memory of each rank while transformers loads a model: into shards, and whole.

    python benchmarks/pretrained_memory.py [--layers 12] [--width 1024] [--output FILE]

The model is made and saved first. Each way of loading it is a job of 2 ranks of its own. Counted is what the process
has for itself (RssAnon), and all that is resident: also pages of the checkpoint, which safetensors maps, and which the
system may drop. Both over what there was before the call.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common import ROOT, Section, argument_parser, table

WAYS = {
    "from_pretrained, into shards": True,
    "from_pretrained whole, then a copy of each parameter": False,
}
VOCABULARY = 32_000
FILE_BYTES = "200MB"
MIB = 2**20


def _memory() -> tuple[int, int]:
    """Return this process's own bytes, and all that are resident."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    own, resident = (int(status[name].split()[0]) * 1024 for name in ("RssAnon", "VmRSS"))
    return own, resident


class _Peak(threading.Thread):
    """Looks at the memory of this process until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._before = self._peak = _memory()
        self._is_over = threading.Event()

    def run(self) -> None:
        """Look every two milliseconds."""
        while not self._is_over.wait(0.002):
            own, resident = _memory()
            self._peak = (max(self._peak[0], own), max(self._peak[1], resident))

    def stop(self) -> tuple[int, int, int]:
        """Return the peaks of own and of resident memory, and own memory that is left, over what there was before."""
        self._is_over.set()
        self.join()
        own, resident = (peak - before for peak, before in zip(self._peak, self._before, strict=True))
        return own, resident, _memory()[0] - self._before[0]


def load(path: Path, *, is_sharded: bool, result: Path) -> None:
    """On a rank: load the model and write what it took."""
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    deepspeed.init_distributed()
    AutoModelForCausalLM.from_config(shape(layers=1, width=64, vocabulary=64))  # imports
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    alive = HfDeepSpeedConfig(config) if is_sharded else None
    torch.distributed.barrier()
    start_s = time.perf_counter()
    peak = _Peak()
    peak.start()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if not is_sharded:  # else they are pages of the mapped checkpoint until something is written into them
        for param in model.parameters():
            param.data = param.data.clone()
    own, resident, left = peak.stop()
    seconds = time.perf_counter() - start_s
    held = sum(param.ds_tensor.nbytes if is_sharded else param.nbytes for param in model.parameters())
    rank = int(os.environ["RANK"])
    result.with_suffix(f".{rank}").write_text(json.dumps([held, left, own, resident, seconds]))
    torch.distributed.barrier()
    del alive


def shape(layers: int, width: int, vocabulary: int) -> Any:
    """Return the config of the model."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=vocabulary,
    )


def save(path: Path, layers: int, width: int) -> tuple[int, int]:
    """Save a model; return the bytes of its parameters and of the largest one."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(shape(layers, width, VOCABULARY))
    model.save_pretrained(path, max_shard_size=FILE_BYTES)
    sizes = [param.nbytes for param in model.parameters()]
    return sum(sizes), max(sizes)


def measure(folder: Path, path: Path, name: str) -> list[list[Any]]:
    """Load the model in a job of 2 ranks; return what each rank wrote."""
    from harness.launch.command import run_launch

    result = folder / "found"
    kind = "sharded" if WAYS[name] else "whole"
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    done = run_launch(folder, "--num_gpus=2", Path(__file__), "--rank", kind, path, result, env=environment)
    if done.code:
        raise SystemExit(done.out + done.err)
    return [json.loads(result.with_suffix(f".{rank}").read_text()) for rank in range(2)]


def main() -> None:
    """Measure and write."""
    if sys.argv[1:2] == ["--rank"]:
        kind, path, result = sys.argv[2:5]
        load(Path(path), is_sharded=kind == "sharded", result=Path(result))
        return
    parser = argument_parser(__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    page = Section("Loading a model of transformers", "torch", "transformers")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        model_bytes, largest_bytes = save(path, options.layers, options.width)
        for name in WAYS:
            for rank, (held, left, own, resident, seconds) in enumerate(measure(Path(folder), path, name)):
                figures = [f"{size / MIB:.0f}" for size in (held, left, own, resident)]
                rows.append([name, str(rank), *figures, f"{seconds:.1f}"])
    header = ["way", "rank", "parameters held", "own memory after", "peak of own", "peak of resident", "seconds"]
    text = (
        f"A model of {model_bytes / 4e6:.0f} M parameters in fp32 ({model_bytes / MIB:.0f} MiB, the largest parameter"
        f" {largest_bytes / MIB:.0f}), in files of {FILE_BYTES}. MiB over what there was before the call."
        " Loaded whole, parameters are pages of the mapped checkpoint until something is written into them, as the"
        f" first step does: here each is copied.\n\n{table(header, rows)}"
    )
    page.write("One job each: each figure is one sample", text, options.output)


if __name__ == "__main__":
    main()
