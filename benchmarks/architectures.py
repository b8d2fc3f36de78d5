"""Small models of every kind in transformers, timm, diffusers and peft, trained by the engine and by plain torch.

    python benchmarks/architectures.py [--only transformers/llama timm/resnet10t ...] [--output FILE]

Each is built from a configuration made small, with no dropout, and trained 3 steps on 2 ranks at stages 0, 2, 3 and at
stage 3 with optimizer and parameters in host memory. Losses and final weights are held against AdamW in plain torch on
one process, which sees the batches of both ranks. At stage 3 every parameter is sharded, however small. Exits with 1
when a model that plain torch trains does not train equally.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import BIN, ROOT, Goal, Section, argument_parser, goals_table, table

# Model types, of each of which the class is taken that `harness.train.tiny.class_of` finds first.
TRANSFORMERS = """
apertus bamba biogpt bloom cohere cohere2 cpmant ctrl deepseek_v3 diffllama ernie4_5_moe exaone4 falcon falcon_h1
falcon_mamba gemma gemma2 glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss granite granitemoe granitemoehybrid
hunyuan_v1_moe jamba jetmoe kimi_linear lfm2 lfm2_moe llama longcat_flash mamba mamba2 minimax mistral mixtral mpt
nanochat nemotron_h olmo2 olmo_hybrid olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe
qwen3_next recurrent_gemma rwkv smollm3 stablelm starcoder2 xglm xlnet xlstm zaya
albert bert big_bird canine convbert deberta deberta-v2 distilbert electra esm flaubert fnet funnel ibert layoutlm
longformer luke markuplm modernbert mpnet mra nomic_bert nystromformer roberta roformer squeezebert tapas xlm
xmod yoso visual_bert vilt
bart bigbird_pegasus blenderbot encoder-decoder fsmt led longt5 m2m_100 marian mbart mt5 nllb-moe pegasus_x prophetnet
seamless_m4t_v2 switch_transformers t5 t5gemma umt5
altclip clip clipseg flava florence2 git groupvit idefics2 idefics3 internvl llava llava_next llava_onevision mistral3
mllama ovis2 paligemma owlvit qwen2_vl qwen3_vl qwen3_vl_moe siglip smolvlm video_llava vipllava vision-encoder-decoder
granite_speech voxtral
beit bit convnext convnextv2 data2vec-vision deit dinov2 dinov3_convnext focalnet hiera imagegpt mobilenet_v2
mobilevit pvt_v2 regnet resnet rf_detr segformer swiftformer swin2sr swinv2 timesformer videomae vit vit_mae vitdet
vivit vjepa2 yolos
audio-spectrogram-transformer canary data2vec-audio hubert pop2piano sew sew-d speecht5 unispeech unispeech-sat wav2vec2
wav2vec2-conformer wavlm whisper parakeet_tdt patchtst patchtsmixer
"""
SETTINGS = ("stage 0", "stage 2", "stage 3", "3 + offload")
PLAIN = "plain torch"
LIMIT = 1e-5
METHOD = """
Small models, none of them adapted, trained 3 steps on 2 ranks with AdamW in fp32, beside AdamW in plain torch on one
process that sees the batches of both ranks: the largest relative difference of any loss and of any final weight
(2-norm). At stage 3 every parameter is sharded; the last column keeps optimizer and parameters in host memory.
Elements whose gradient is rounding and nothing else (below 1e-6 of the largest: biases of keys) are not compared: AdamW
makes full steps of it all the same. Dropout is 0; what else a model draws in its forward, it draws from the same seed.
""".strip()
WHY_BITS_DIFFER = (
    "Where a tensor is read by several modules, stage 3 adds its gradients module by module, which is another order "
    "than plain torch's: the last\nbits of a sum differ then."
)
LONGEST_RUN_S = 180.0  # one model, three steps, on a machine with other work


@dataclass
class Row:
    """What was found of one family."""

    name: str
    facts: dict[str, Any] = field(default_factory=dict)  # class, kind, parameters
    plain_error: str = ""
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)  # setting -> loss, weight, where; or error

    @property
    def is_counted(self) -> bool:
        """Whether plain torch trains it."""
        return not self.plain_error

    def is_equal(self, setting: str) -> bool:
        """Whether losses and weights agree."""
        found = self.outcomes.get(setting, {"error": ""})
        return "error" not in found and max(found["loss"], found["weight"]) <= LIMIT

    def has_same_bits(self, setting: str) -> bool:
        """Whether there is no difference at all."""
        return self.is_equal(setting) and self.outcomes[setting]["loss"] == self.outcomes[setting]["weight"] == 0.0

    @property
    def is_good(self) -> bool:
        """Whether it is equal at every setting."""
        return all(self.is_equal(setting) for setting in SETTINGS)

    def cell(self, setting: str) -> str:
        """Return what the table says of a setting."""
        found = self.outcomes.get(setting)
        if found is None:
            return "not run"
        if "error" in found:
            return "**" + _short(found["error"]) + "**"
        worst = max(found["loss"], found["weight"])
        if self.is_equal(setting):
            return "equal" if worst == 0.0 else f"equal, {worst:.0e}"
        return f"**{found['loss']:.0e}, {found['weight']:.0e}** at {found['where']}"


def _short(error: str) -> str:
    return " ".join(error.split())[:120].replace("|", "/")


def train_all(names: list[str], folder: Path) -> list[Row]:
    """Train every family at every setting; a job that fails is followed by one with the rest."""
    rows = {name: Row(name) for name in names}
    results = folder / "results.jsonl"
    todo: list[tuple[str, tuple[str, ...]]] = [(name, SETTINGS) for name in names]
    while todo:
        results.unlink(missing_ok=True)
        error = _run([name if left == SETTINGS else f"{name}@{','.join(left)}" for name, left in todo], folder)
        name, setting = _read(results, rows)
        if not error:
            break
        if not name:
            raise SystemExit(f"the job did not begin: {error}")
        if setting == PLAIN:
            rows[name].plain_error = error
        else:
            rows[name].outcomes[setting] = {"error": error}
        index = [entry for entry, _ in todo].index(name)
        left = () if setting == PLAIN else todo[index][1][todo[index][1].index(setting) + 1 :]
        todo = [(name, left)] * bool(left) + todo[index + 1 :]
    return list(rows.values())


def _read(results: Path, rows: dict[str, Row]) -> tuple[str, str]:
    """Read what a job has noted; return the family and the setting that began last."""
    last = ("", "")
    for line in results.read_text().splitlines() if results.exists() else ():
        found = json.loads(line)
        if "begins" in found:
            last = tuple(found["begins"])
            continue
        row, setting = rows[found.pop("family")], found.pop("setting")
        if setting != PLAIN:
            row.outcomes[setting] = found
        elif "error" in found:
            row.plain_error = found["error"]
        else:
            row.facts = found
    return last


def _run(entries: list[str], folder: Path) -> str:
    """Run one job; return why it ended before its end, or nothing."""
    for path in folder.glob("error_of_rank_*.json"):
        path.unlink()
    search = [str(ROOT), str(ROOT / "tests"), str(BIN.parent / "models")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [str(BIN / "launch"), "--quiet", "--log-dir", str(folder / "runs"), "--num_gpus", "2"]
    with (folder / "output.txt").open("w") as output:
        job = subprocess.Popen(
            [*command, "-m", "harness.train.families", str(folder), *entries],
            cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        is_stuck = not _wait(job, folder / "results.jsonl")
    if is_stuck:
        return f"no end within {LONGEST_RUN_S:.0f} s"
    if job.returncode == 0:
        return ""
    errors = [json.loads(path.read_text())["error"] for path in sorted(folder.glob("error_of_rank_*.json"))]
    return errors[0] if errors else f"the job ended with {job.returncode}: {(folder / 'output.txt').read_text()[-300:]}"


def _wait(job: subprocess.Popen[bytes], results: Path) -> bool:
    """Wait for the end of a job; end it when its results have not grown for too long. Returns whether it ended."""
    size, since_s = 0, time.monotonic()
    while job.poll() is None:
        time.sleep(0.5)
        now = results.stat().st_size if results.exists() else 0
        if now != size:
            size, since_s = now, time.monotonic()
        elif time.monotonic() - since_s > LONGEST_RUN_S:
            job.terminate()
            job.wait()
            return False
    return True


def report(rows: list[Row]) -> str:
    """Return the text of the section."""
    counted = [row for row in rows if row.is_counted]
    num_equal = sum(row.is_good for row in counted)
    num_same = sum(row.has_same_bits(setting) for row in counted for setting in SETTINGS)
    goal = Goal(
        "families that train as in plain torch at all four settings",
        f"all, to {LIMIT:g} relative",
        f"{num_equal} of {len(counted)}",
        num_equal == len(counted),
        "see the rows in bold",
    )
    libraries = Counter(row.name.partition("/")[0] for row in counted)
    texts = [
        METHOD,
        goals_table([goal]),
        f"Of these, {', '.join(f'{number} are of {name}' for name, number in libraries.items())}. "
        f"{num_same} of {len(counted) * len(SETTINGS)} runs have the same bits as plain torch; for the others a number "
        f"says how far apart they are. {WHY_BITS_DIFFER}",
        table(
            ["family", "class", "kind", "parameters", *SETTINGS],
            [
                [
                    row.name.partition("/")[2],
                    row.facts["class"],
                    row.facts["kind"],
                    f"{row.facts['parameters']:,}",
                    *(row.cell(setting) for setting in SETTINGS),
                ]
                for row in counted
            ],
        ),
    ]
    others = [row for row in rows if not row.is_counted]
    if others:
        texts.append("Not counted, because plain torch does not train them here:")
        texts.append("\n".join(f"* {row.name}: {_short(row.plain_error)}" for row in others))
    return "\n\n".join(texts)


def main() -> int:
    """Train everything and write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="families as LIBRARY/MODEL; default: all")
    options = parser.parse_args()
    page = Section("Models that were not adapted", "torch", "transformers", "diffusers", "peft")
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = train_all(options.only or all_families(), Path(folder))
    samples = f"{len(rows)} families, each once, in {time.monotonic() - begun_s:.0f} s; no figure is a time"
    page.write(samples, report(rows), options.output)
    return 0 if all(row.is_good for row in rows if row.is_counted) else 1


def all_families() -> list[str]:
    """Return the names of all families."""
    from harness.train.catalogue import OTHERS

    return [f"transformers/{name}" for name in TRANSFORMERS.split()] + list(OTHERS)


if __name__ == "__main__":
    sys.exit(main())
