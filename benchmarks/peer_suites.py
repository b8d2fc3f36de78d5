"""Tests of the projects that this one stands in for, against the built-in engine and against the real DeepSpeed.

    python benchmarks/peer_suites.py --suite deepspeed --tests FOLDER [--real [PYTHON]] [--json FILE] [--output FILE]

FOLDER is a checkout of the project, or its tests alone: none of them are in this repository. `import deepspeed` is the
built-in engine of this interpreter, as ranks of `launch` get it; --real names one with DeepSpeed, by default this one.
Everything runs on CPUs, with gloo, on 2 ranks at most. Each file has a pytest process of its own, and a test that ends
or blocks it fails alone: the others run in a process after it. Of a function with parameters the first set runs, the
same with both engines. A file that cannot be imported counts with all its tests. RUN_SLOW=1 adds the slow tests of
Hugging Face. --suite deepspeed needs pytest below 8.4, and mup for one file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

import peer_plugin
from common import NOT_INSTALLED, ROOT, Section, argument_parser, current_commit, table

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
BOTH, ONLY_REAL, ONLY_OURS, NEITHER = "both passed", "only real", "only ours", "neither"
OURS, REAL = "ours", "real"
# Python reads sitecustomize.py at each start: ranks and other processes of a test get the engine, too.
AT_START = 'import launcher.compat\n\nlauncher.compat.install("builtin")\n'
# ... and changes modules behind their import.
CHANGE_MODULES = """
import importlib.machinery, sys
class Finder:
    def find_spec(name, path, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in CHANGES else None
        if spec is not None:
            execute = spec.loader.exec_module
            def exec_module(module):
                execute(module)
                exec(CHANGES[name], vars(module))
            spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder)
"""
# Puts models with random weights, and a tokenizer whose words are bytes, where libraries look for what the hub has.
MAKE_MODELS = """
import json, pathlib, sys, tokenizers, transformers
alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
words = [(word, -1.0) for word in ("<pad>", "</s>", "<unk>", *alphabet)]
bytes_only = tokenizers.Tokenizer(tokenizers.models.Unigram(words, unk_id=2))
bytes_only.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
for name, (kind, values) in json.loads(sys.argv[2]).items():
    folder = pathlib.Path(sys.argv[1], "hub", "models--" + name.replace("/", "--"))
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("0" * 40)
    config = transformers.AutoConfig.for_model(kind, **values)
    is_text = type(config) in transformers.AutoModelForCausalLM._model_mapping
    maker = transformers.AutoModelForCausalLM if is_text else transformers.AutoModel
    maker.from_config(config).save_pretrained(folder / "snapshots" / ("0" * 40))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder / "snapshots" / ("0" * 40))
"""
# DeepSpeed compiles these at their first use. A test that is ended meanwhile leaves a lock, on which all others wait.
BUILD_KERNELS = """
import deepspeed
from deepspeed.ops.op_builder.cpu import CPUAdagradBuilder, CPUAdamBuilder, CPULionBuilder, FusedAdamBuilder
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
for builder in (CPUAdamBuilder, FusedAdamBuilder, ShareMemCommBuilder, CPUAdagradBuilder, CPULionBuilder):
    builder().load(verbose=False)
"""
_TINY_GPT2: dict[str, object] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 1000, "n_positions": 64}
_TINY_MOE: dict[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "vocab_size": 1000,
    "num_experts": 4,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
_TINY_LLAMA: dict[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "vocab_size": 1000,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_TINY_T5: dict[str, object] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 32,
    "vocab_size": 1000,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
_LAST_WORDS_S = 5.0  # of a process that writes its stack
_INTERNALS = "internals: private names, log lines of steps inside; no script sees them"
# The real engine refuses fp16 where the CPU has no instructions for it, though it would train; accelerate takes ranks
# of DeepSpeed on CPUs for single processes. The built-in engine brings a change of the second kind.
_REAL_ON_CPUS = {
    "deepspeed.accelerator.cpu_accelerator": "CPU_Accelerator.is_fp16_supported = lambda self: True",
    "accelerate.state": """
_prepare_backend = PartialState._prepare_backend
def _with_gloo(self, *arguments, **options):
    backend, distributed_type = _prepare_backend(self, *arguments, **options)
    is_rank = "LOCAL_RANK" in os.environ and os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    return (backend or "gloo" if is_rank else backend), distributed_type
PartialState._prepare_backend = _with_gloo
""",
}
_PRIVATE = "looks at private parts: names with an underscore, buffers and hooks inside, the words of a message"
_GPU = "a GPU, or kernels of inference"
_MORE = "4 ranks or more, or the hub"


@dataclass(frozen=True)
class Suite:
    """The tests of one project."""

    package: str  # whose version the page names
    folder: str  # of the tests that are run, below `tests`
    pattern: str = "**/test_*.py"  # of files in it
    arguments: tuple[str, ...] = ()  # of pytest
    environment: Mapping[str, str] = field(default_factory=dict)
    is_run_above: bool = False  # paths in the tests begin with `tests/`
    # Module -> statements that run in it when it has been imported: what keeps tests from CPUs that work there as well.
    changes: Mapping[str, str] = field(default_factory=dict)
    edits: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # path -> text -> what replaces it
    models: Mapping[str, tuple[str, dict[str, object]]] = field(default_factory=dict)  # of the hub -> type, config
    excluded: Mapping[str, str] = field(default_factory=dict)  # reason -> patterns of files in the folder
    reasons: Mapping[str, str] = field(
        default_factory=dict
    )  # why ours does not pass a test -> patterns of `file::test`

    def files(self, tests: Path) -> list[str]:
        """Return the files that count, relative to `tests`."""
        return [f"{self.folder}/{path}" for path in self.candidates(tests) if not self.reason_against(path)]

    def candidates(self, tests: Path) -> list[str]:
        """Return all files with tests, relative to the folder."""
        folder = tests / self.folder
        return sorted(path.relative_to(folder).as_posix() for path in folder.glob(self.pattern))

    def edit(self, tests: Path) -> None:
        """Replace what the suite says in a copy of the tests."""
        for path, texts in self.edits.items():
            content = (tests / path).read_text()
            for old, new in texts.items():
                content = content.replace(old, new)
            (tests / path).write_text(content)

    def reason_against(self, path: str) -> str:
        """Return why a file does not count, or nothing."""
        found = self.excluded.items()
        reasons = (why for why, patterns in found if any(fnmatch(path, one) for one in patterns.split()))
        return next(reasons, "")


SUITES = {
    "deepspeed": Suite(
        package="deepspeed",
        folder="unit",
        # Its pytest.ini leaves out what its own CI runs one at a time; here everything is run so.
        arguments=("-o", "addopts=", "-m", "not nightly and not inference and not seq_inference"),
        environment={"LOCAL_SIZE": "2"},  # a test that wants more ranks than this is skipped
        excluded={
            _INTERNALS: """
                compile/* v1/compile/* *autosp* runtime/test_engine_eigenvalue.py v1/zero/*record_stream*
                v1/moe/test_autoep* v1/moe/test_fused_expert_layout.py *zenflow/* */test_zf_* *rollout/*
                module_inject/* *test_tp_plan* *test_autotp_custom* *autotp_u* runtime/tensor_parallel/*
                ops/test_op_builder.py v1/pin_memory/* v1/nvme/* runtime/comm/* utils/test_byte_cast.py
                utils/test_nvtx.py utils/test_pin_memory* runtime/pipe/test_pipe_schedule.py v1/multimodal/*
                runtime/zero/test_zero_allreduce_fetch* launcher/test_user_args.py *nvme_checkpointing*
                runtime/zero/test_zero_late_module_attach.py runtime/zero/test_zero_linear_direct_init.py
                runtime/zero/test_zero_hook_attribute_delegation.py v1/accelerator/test_accelerator.py
                v1/half_precision/test_mixed_precision_dtype.py v1/zero/test_zero_hook_count_regression.py
                v1/zero/test_stage2_flatten_on_gpu.py v1/zero/test_zero_init_pg_contradiction.py
            """,
            _GPU: """
                inference/* hybrid_engine/* ops/transformer/* ops/accelerators/* ops/deepspeed4science/*
                ops/fp_quantizer/* ops/quantizer/* ops/sparse_attention/* ops/spatial/* v1/ops/*
                sequence/* runtime/half_precision/test_fp8.py linear/test_linear.py linear/test_quant*
            """,
            _MORE: "model_parallelism/* *mics* *zeropp* *offloadpp* *onebit/* *reshape_checkpoint*",
            "dropped by the real one": "compression/* autotuning/* elasticity/* runtime/test_pld.py",
        },
        reasons={
            _PRIVATE: """
                test_zero_optimizer::*chmod* test_zero_optimizer::*elastic_checkpoint_is_deprecated*
                test_pipe_module::TestPipeModuleCheckpointInterval::* test_offload_activations::*buffer_key*
                test_offload_activations::*empty_cpu_like* test_unwrap_model::TestUnwrapModel::*
                test_activation_checkpointing::*requires_num_checkpoints* test_zero_context_return::*ext_param_return*
                test_ds_config_dict::test_invalid_gradient* test_no_sync_ctxt::*reentry*
                test_no_sync_ctxt::*test_engine_step* test_zero_grad_clip::*
                test_gradient_clipping_default::*getter* test_engine_log_level::*getter* test_moe::*test_all_to_all*
                test_ulysses::TestUlyssesCheckpointLoad::* test_zero::TestBF16* test_zero::*NcclAlignment*
                test_zero2_offload_multi_backward::*no_cpu_accumulator*
                test_zero_activation_checkpoint_lifecycle::* test_zero_cpu_offload_grad_accum::*
                test_zero_functorch_linear::*patched_functional* test_zero_functorch_linear::*autocast_attrs*
                test_zero_coalesce_grad_reduction::TestCoalesceCollectiveCount*
                test_zero_coalesce_grad_reduction::*micro_step_id* test_zero_coalesce_grad_reduction::*pipeline*
                test_zero_coalesce_grad_reduction::*boundary_restored*
            """,
            "has another form here: one cut for several parameters, gradients that no rank has whole, "
            "`zero.Init()` without a config in the type that layers are built in": """
                test_zero::TestZero3ParamPartitioningBase::* test_zero::TestZeroPartitionCache::*
                test_zero_coalesce_grad_reduction::*local_pre_reduce* test_zero_context::*halftype*
                test_muon::TestMuonZero12NumericalCorrectness::*
            """,
            "wants a refusal of what works here": """
                test_ds_config_dict::*rejects* test_zero_leaf_module::*no_grad_input* test_zero::TestZeroOffloadOptim::*
                test_zero_coalesce_grad_reduction::*uses_bf16_optimizer* test_zero_torch_func::*StillRaises*
                test_zero_user_backward::*rejects_overlap_comm*
            """,
            'looks for files by DeepSpeed\'s names, which `checkpoint.format` "deepspeed" writes': """
                test_zero_optimizer::*save_exclude*
            """,
            "is about what the built-in engine has not: ZenFlow, layers with LoRA": """
                test_cpu_adam::*zenflow* test_ctx::*
            """,
        },
    ),
    "accelerate": Suite(
        package="accelerate",
        folder="deepspeed",
        # Only its sizes matter to the tests.
        models={
            "gpt2": ("gpt2", _TINY_GPT2),
            "sshleifer/tiny-gpt2": ("gpt2", _TINY_GPT2),
            "hf-internal-testing/tiny-random-gpt2": ("gpt2", _TINY_GPT2),
            "apple/mobilevit-xx-small": ("mobilevit", {"hidden_sizes": [8, 8, 8], "neck_hidden_sizes": [8] * 7}),
            "peft-internal-testing/tiny-random-qwen-1.5-MoE": ("qwen2_moe", _TINY_MOE),
            "hf-internal-testing/tiny-random-LlamaForCausalLM": ("llama", _TINY_LLAMA),
        },
        changes={
            "accelerate.test_utils.testing": (
                "require_non_cpu = require_fp16 = require_multi_device = lambda case: case"
            ),
            **_REAL_ON_CPUS,
        },
    ),
    "transformers": Suite(
        package="transformers",
        folder="trainer/distributed",
        pattern="test_*deepspeed*.py",
        arguments=("-k", "not ModelZoo"),  # needs example scripts, models and data of the hub
        models={
            "sshleifer/tiny-gpt2": ("gpt2", _TINY_GPT2),
            "hf-internal-testing/tiny-random-gptj": ("gptj", {**_TINY_GPT2, "rotary_dim": 8}),
            "patrickvonplaten/t5-tiny-random": ("t5", _TINY_T5),
            "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5": ("qwen2", _TINY_LLAMA),
        },
        is_run_above=True,
        changes={
            "transformers.testing_utils": (
                "require_torch_accelerator = require_torch_multi_accelerator = lambda case: case\n"
                "backend_device_count = lambda device: 2"
            ),
            "transformers.training_args": "is_torch_bf16_gpu_available = lambda: True",
            **_REAL_ON_CPUS,
        },
        # Parameters without a dimension fail in the real engine.
        edits={
            "trainer/trainer_test_utils.py": {
                f"torch.as_tensor(config.{name}).float()": f"torch.as_tensor([config.{name}]).float()" for name in "ab"
            }
        },
    ),
    "lightning": Suite(package="lightning", folder=".", pattern="tests_*/strategies/test_deepspeed*.py"),
}


@dataclass
class Outcomes:
    """What one engine made of one file."""

    tests: dict[str, tuple[str, str]] = field(default_factory=dict)  # name -> outcome, cause
    chosen: list[str] = field(default_factory=list)
    file_fails: str = ""  # why nothing of it was collected
    file_skips: str = ""
    commit: str = ""  # of this project, that ran the file

    def of(self, test: str) -> tuple[str, str]:
        """Return outcome and cause of a test, which another engine may have collected."""
        if test in self.tests:
            return self.tests[test]
        if self.file_skips:
            return SKIPPED, self.file_skips
        return FAILED, self.file_fails or "not collected"


@dataclass(frozen=True)
class Runner:
    """Runs a file's tests with one engine."""

    name: str
    python: str
    suite: Suite
    tests: Path
    limit_s: float
    every_parametrisation: bool
    builds: Path  # the folder of the kernels that the real engine compiles

    def run(self, file: str, choice: list[str] | None, slot: int) -> Outcomes:
        """Run a file; after a test that ended the process, the tests behind it in a new one.

        choice: the tests to run; None: the plugin chooses. slot: which of the files that run at once this is.
        """
        found = Outcomes()
        while True:
            with tempfile.TemporaryDirectory(prefix="peer_") as folder:
                end = self._start(file, choice, slot, Path(folder))
                last = _read(Path(folder, "notes"), found)
            left = [test for test in found.chosen if test not in found.tests]
            if not found.chosen and not found.file_fails and not found.file_skips:
                found.file_fails = end or "nothing collected"
            if not left or found.file_fails:
                return found
            found.tests[last if last in left else left[0]] = (FAILED, end or "pytest ended before the test did")
            choice = [test for test in left if test not in found.tests]
            if not choice:
                return found

    def _start(self, file: str, choice: list[str] | None, slot: int, folder: Path) -> str:
        """Run pytest; return why it ended early, or nothing."""
        environment = self._environment(slot, folder)
        if choice is not None:
            environment[peer_plugin.CHOICE] = str(folder / "choice")
            (folder / "choice").write_text(json.dumps(choice))
        command = [
            self.python,
            "-m",
            "pytest",
            "-p",
            peer_plugin.__name__,
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
        ]
        command += ["-q", "--basetemp", str(folder / "tmp"), *self.suite.arguments]
        command.append(f"{self.tests.name}/{file}" if self.suite.is_run_above else file)
        with (folder / "output").open("w") as output:
            job = subprocess.Popen(
                command, cwd=self.tests.parent if self.suite.is_run_above else self.tests, env=environment,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            is_stuck = not _wait(job.pid, folder / "notes", self.limit_s)
            if is_stuck:
                os.kill(job.pid, signal.SIGABRT)  # pytest has a handler that writes the stack
                _wait(job.pid, folder / "notes", _LAST_WORDS_S)
            # Ranks of the test are in the session of pytest, whose number is not free while it is not waited for.
            os.killpg(job.pid, signal.SIGKILL)
            code = job.wait()
        if is_stuck:
            return f"no end within {self.limit_s:.0f} s{_place_of((folder / 'output').read_text(errors='replace'))}"
        if code in (0, 1, 2, 5):  # passed, failed, interrupted by a collection error, nothing collected
            return ""
        lines = (folder / "output").read_text(errors="replace").strip().splitlines() or [""]
        return (
            f"the process was killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}: {lines[-1]}"
        )

    def _environment(self, slot: int, folder: Path) -> dict[str, str]:
        """Return the variables of pytest and of all that its tests start."""
        (folder / f"{peer_plugin.__name__}.py").write_text(Path(peer_plugin.__file__).read_text())
        path = [str(folder)]
        at_start = f"CHANGES = {dict(self.suite.changes)!r}\n{CHANGE_MODULES}" if self.suite.changes else ""
        if self.name == OURS:
            at_start += AT_START
            path.append(str(ROOT))
        if at_start:
            (folder / "sitecustomize.py").write_text(at_start)
        environment = {**os.environ, **self.suite.environment}
        environment["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment["PATH"] = f"{Path(self.python).parent}{os.pathsep}{os.environ['PATH']}"
        environment["TORCH_EXTENSIONS_DIR"] = str(self.builds)
        environment[peer_plugin.NOTES] = str(folder / "notes")
        environment[peer_plugin.EVERY_PARAMETRISATION] = str(int(self.every_parametrisation))
        environment["PYTEST_XDIST_WORKER"] = f"gw{slot}"  # DeepSpeed's tests take their ports by it
        environment["DS_UNITTEST_TIMEOUT"] = str(int(self.limit_s * 0.8))
        environment |= {
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return environment

    def prepare(self) -> None:
        """Compile what the real engine would compile within a test, and its time limit."""
        if self.name == REAL:
            with tempfile.TemporaryDirectory(prefix="peer_") as folder:
                environment = self._environment(0, Path(folder))
                subprocess.run([self.python, "-c", BUILD_KERNELS], env=environment, stdout=sys.stderr)


def _wait(pid: int, notes: Path, limit_s: float) -> bool:
    """Wait for the end of a process, and leave it for `wait`; False where it notes nothing for so long."""
    size, since_s = -1, time.monotonic()
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() - since_s > limit_s:
            return False
        new_size = notes.stat().st_size if notes.exists() else 0
        if new_size != size:
            size, since_s = new_size, time.monotonic()
        time.sleep(0.05)
    return True


def _place_of(output: str) -> str:
    """Return where the main thread was by the stack that faulthandler wrote last, or nothing."""
    frames = re.findall(
        r'^  File "([^"]+)", line (\d+) in (.+)$', output.rpartition("Current thread ")[2], re.MULTILINE
    )
    if "Current thread " not in output or not frames:
        return ""
    path, line, function = frames[0]
    return f", in {function} ({Path(path).name}:{line})"


def _read(notes: Path, found: Outcomes) -> str:
    """Add what a process has noted; return the test that began last."""
    last = ""
    is_first = not found.chosen
    for line in notes.read_text().splitlines() if notes.exists() else ():
        facts = json.loads(line)
        if "test" in facts:
            if found.tests.get(facts["test"], (PASSED, ""))[0] != FAILED:  # an error in teardown counts, none is undone
                found.tests[facts["test"]] = (facts["outcome"], facts["cause"])
        elif "chosen" in facts and is_first:
            found.chosen = facts["chosen"]
        elif "begins" in facts:
            last = facts["begins"]
        elif "file_fails" in facts:
            found.file_fails = facts["file_fails"]
        elif "file_skips" in facts:
            found.file_skips = facts["file_skips"]
    return last


def run_files(
    files: Iterable[str],
    runners: list[Runner],
    jobs: int,
    known: Mapping[str, dict[str, Outcomes]],
    output: Path | None,
) -> dict[str, dict[str, Outcomes]]:
    """Run files, the real engine first, whose choice of tests is ours; write what there is after each."""
    slots: SimpleQueue[int] = SimpleQueue()
    for slot in range(jobs):
        slots.put(slot)
    results: dict[str, dict[str, Outcomes]] = {}
    writing = Lock()

    def run(file: str) -> None:
        slot = slots.get()
        found = dict(known.get(file, {}))
        for runner in runners:
            if runner.name not in found:
                choice = found[REAL].chosen if REAL in found else []
                found[runner.name] = runner.run(file, choice or None, slot)
                found[runner.name].commit = current_commit()
        slots.put(slot)
        results[file] = found
        if output is not None:
            with writing:
                write_json(results, output)
        print(f"{file}: {dict(Counter(kinds(found).values()))}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(run, files):
            pass
    return dict(sorted(results.items()))


def write_json(results: Mapping[str, Mapping[str, Outcomes]], output: Path) -> None:
    """Write the outcomes, whole or not at all: others may read the file meanwhile."""
    document = {
        file: {name: asdict(outcomes) for name, outcomes in found.items()} for file, found in list(results.items())
    }
    part = output.with_name(f"{output.name}.{os.getpid()}.part")
    part.write_text(json.dumps(document, indent=1, sort_keys=True))
    part.rename(output)


def read_json(path: Path, names: tuple[str, ...]) -> dict[str, dict[str, Outcomes]]:
    """Read what `write_json` has written of these engines."""
    document = json.loads(path.read_text())
    return {
        file: {name: Outcomes(**outcomes) for name, outcomes in found.items() if name in names}
        for file, found in document.items()
    }


def kinds(found: Mapping[str, Outcomes]) -> dict[str, str]:
    """Return what became of each test of a file: one of the columns of the page.

    What only the real engine passes counts as such where ours skips it, too.
    """
    names = {test: None for outcomes in found.values() for test in outcomes.chosen}
    if not names:
        names = {"(the file)": None}
    result = {}
    for test in names:
        ours = found[OURS].of(test)[0]
        real = found[REAL].of(test)[0] if REAL in found else None
        if real is None:
            result[test] = ours
        elif PASSED in (ours, real):
            result[test] = BOTH if ours == real else ONLY_OURS if ours == PASSED else ONLY_REAL
        else:
            result[test] = SKIPPED if SKIPPED in (ours, real) else NEITHER
    return result


def page_text(results: Mapping[str, Mapping[str, Outcomes]], has_real: bool, reasons: Mapping[str, str]) -> str:
    """Return the tables: by file, why ours does not pass what the real one passes, and the causes of what fails."""
    columns = [BOTH, ONLY_REAL, ONLY_OURS, NEITHER, SKIPPED] if has_real else [PASSED, FAILED, SKIPPED]
    counts = {file: Counter(kinds(found).values()) for file, found in results.items()}
    total = Counter[str]()
    for count in counts.values():
        total.update(count)
    rows = [[file, *(str(count[column] or "") for column in columns)] for file, count in counts.items()]
    parts = [table(["file", *columns], [*rows, ["all", *(str(total[column]) for column in columns)]])]
    if has_real and total[BOTH] + total[ONLY_REAL]:
        by_reason = reasons_of(results, reasons)
        ours, by_real = total[BOTH], total[BOTH] + total[ONLY_REAL]
        text = f"Of {by_real} tests that the real one passes, ours passes {ours} ({ours / by_real:.1%})"
        if num_private := by_reason[_PRIVATE]:
            public = by_real - num_private
            text += f"; {ours / public:.1%} of the {public} that do not fail because they look at private parts"
        parts.insert(0, f"{text}.")
        if by_reason and reasons:
            rows = [[why, str(number)] for why, number in by_reason.most_common()]
            parts.append(f"### Why ours does not pass what the real one passes\n\n{table(['the test', 'tests'], rows)}")
    titles = {ONLY_REAL: "What the real one passes and ours does not", FAILED: "What fails"}
    titles |= {NEITHER: "What neither passes: what ours says"}
    parts += [f"### {titles[kind]}\n\n{causes(results, kind)}" for kind in titles if total[kind]]
    return "\n\n".join(parts)


def reasons_of(results: Mapping[str, Mapping[str, Outcomes]], reasons: Mapping[str, str]) -> Counter[str]:
    """Return how many of the tests that only the real engine passes have each of the reasons of `Suite.reasons`."""
    only_real = [_short(test) for found in results.values() for test, kind in kinds(found).items() if kind == ONLY_REAL]
    return Counter(
        next((why for why, patterns in reasons.items() if any(fnmatch(test, one) for one in patterns.split())), "open")
        for test in only_real
    )


def causes(results: Mapping[str, Mapping[str, Outcomes]], kind: str) -> str:
    """Return a table of causes, those of most tests first."""
    tests: dict[str, list[str]] = defaultdict(list)
    for found in results.values():
        for test, what in kinds(found).items():
            if what == kind:
                outcome, cause = found[OURS].of(test)
                tests[f"skipped: {cause}" if outcome == SKIPPED else cause].append(test)
    ordered = sorted(tests.items(), key=lambda entry: (-len(entry[1]), entry[0]))
    shown = [
        [str(len(names)), f"`{_cell(cause)}`", ", ".join(f"`{_cell(_short(name))}`" for name in names)]
        for cause, names in ordered
    ]
    return table(["tests", "cause", "which"], shown)


def _short(test: str) -> str:
    file, _, name = test.partition("::")
    return f"{Path(file).stem}::{name}" if name else Path(file).stem


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("`", "'")


def _options() -> argparse.Namespace:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--suite", choices=sorted(SUITES), required=True)
    parser.add_argument("--tests", type=Path, required=True, metavar="FOLDER", help="a checkout, or its folder `tests`")
    parser.add_argument(
        "--real", nargs="?", const=sys.executable, metavar="PYTHON", help="an interpreter with DeepSpeed"
    )
    parser.add_argument("--real-from", type=Path, metavar="JSON", help="take its outcomes from an earlier --json")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="files, such as *zero_context*")
    parser.add_argument("--list", action="store_true", help="show the files that count and those that do not, and why")
    parser.add_argument("--all-parameters", action="store_true", help="run every parametrisation")
    parser.add_argument("--jobs", type=int, default=1, help="files at once; default: %(default)s")
    parser.add_argument(
        "--limit", type=float, default=180.0, metavar="SECONDS", help="of one test; default: %(default)s"
    )
    parser.add_argument(
        "--builds", type=Path, metavar="FOLDER", help="of DeepSpeed's compiled kernels; by default in its environment"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each outcome there, after each file")
    parser.add_argument(
        "--continue",
        dest="continues",
        action="store_true",
        help="keep what is in --json, of a run that has ended early",
    )
    return parser.parse_args()


def _builds(python: str) -> Path:
    return Path(python).parents[1] / "torch_extensions"


def _show_list(suite: Suite, tests: Path) -> None:
    for path in suite.candidates(tests):
        print(f"{path}\t{suite.reason_against(path) or 'counts'}")


def main() -> int:
    """Run and write; return 1 where no file was found."""
    options = _options()
    suite = SUITES[options.suite]
    tests = (options.tests / "tests" if (options.tests / "tests").is_dir() else options.tests).resolve()
    if options.list:
        _show_list(suite, tests)
        return 0
    files = [file for file in suite.files(tests) if any(fnmatch(file, pattern) for pattern in options.only)]
    if not files:
        print(f"no tests of {options.suite} in {tests / suite.folder}: name its checkout by --tests", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="peer_") as folder:
        # Away from the sources beside them, which some suites import before what is installed.
        copy = Path(folder, "checkout", "tests")
        shutil.copytree(tests, copy, symlinks=True)
        suite.edit(copy)
        if suite.models:
            os.environ["HF_HOME"] = str(Path(folder, "huggingface"))
            words = [sys.executable, "-c", MAKE_MODELS, os.environ["HF_HOME"], json.dumps(suite.models)]
            subprocess.run(words, check=True, capture_output=True)
        _measure(options, suite, copy, files)
    return 0


def _measure(options: argparse.Namespace, suite: Suite, tests: Path, files: list[str]) -> None:
    page = Section(f"Tests of {options.suite}", *dict.fromkeys(("torch", suite.package)))
    pythons = {REAL: options.real and os.path.abspath(options.real), OURS: sys.executable}
    builds = options.builds and options.builds.resolve()
    runners = [
        Runner(name, python, suite, tests, options.limit, options.all_parameters, builds or _builds(python))
        for name, python in pythons.items()
        if python
    ]
    for runner in runners:
        runner.prepare()
    known = read_json(options.real_from, (REAL,)) if options.real_from else {}
    if options.continues and options.json.exists():
        for file, found in read_json(options.json, (REAL, OURS)).items():
            known[file] = {**known.get(file, {}), **found}
    results = run_files(files, runners, options.jobs, known, options.json)
    has_real = all(REAL in found for found in results.values())
    which = "Every parametrisation" if options.all_parameters else "One parametrisation of each function"
    beside = f"; the real one is DeepSpeed {_version_of_real(options.real)}" if options.real else ""
    parts = Counter(found[OURS].commit for found in results.values())
    if len(parts) > 1:
        beside += "; in parts: " + ", ".join(f"{number} files at commit {commit}" for commit, number in parts.items())
    page.write(f"{which}, on CPUs{beside}", page_text(results, has_real, suite.reasons), options.output)


def _version_of_real(python: str) -> str:
    code = (
        "from importlib.metadata import distributions\n"
        f"print(next((one.version for one in distributions(name='deepspeed')), {NOT_INSTALLED!r}))"
    )
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
