"""Measure sections of docs/benchmarks.md anew, and put the page together from what was measured.

    python benchmarks/bench.py [SECTION ...]    measure these, or all, then write the page
    python benchmarks/bench.py --page           only write the page

Each section is a file in benchmarks/results, written by the script that measured it, with date, commit and command.
The page is header.md, the figures that `figures.py` takes from these files, and the files in the order of SECTIONS.
docs/scale.md is written whole by its own script. Tests of other projects run only where their section is named, with a
checkout of the project in build/.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import figures
from common import BIN, ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"


@dataclass(frozen=True)
class Section:
    """One section of the page, and what measures it."""

    name: str
    command: str  # without --output; a script without a folder is one of benchmarks/
    num_ranks: int = 0  # that `launch` starts the script on; 0: it is started by itself
    page: Path | None = None  # that the section is the whole of
    is_only_by_name: bool = False  # it needs a folder that nothing here makes

    @property
    def output(self) -> Path:
        """Where its text is kept."""
        return self.page or RESULTS / f"{self.name}.md"

    def measure(self) -> int:
        """Run its script; return the exit code."""
        script, *words = shlex.split(self.command)
        words = [script if "/" in script else f"benchmarks/{script}", *words]
        words += ["--output", str(self.output.relative_to(ROOT))]
        environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        if self.num_ranks:
            words = [str(BIN / "launch"), "--num_gpus", str(self.num_ranks), *words]
            environment["OMP_NUM_THREADS"] = "1"
        else:
            words = [sys.executable, *words]
        before = _shared_buffers()
        code = subprocess.run(words, cwd=ROOT, env=environment).returncode
        for path in _shared_buffers() - before:
            path.unlink(missing_ok=True)
        return code


def _shared_buffers() -> set[Path]:
    """Return what DeepSpeed shares between ranks: its ranks leave these files behind, and they hold memory."""
    return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))


# In the order of the page. Rounds are chosen so that all of it takes about an hour on two cores, a third of it waiting.
SECTIONS = (
    Section("startup", "startup.py --ranks 2 4 --rounds 4"),
    Section("fanout", "fanout.py --rounds 2"),
    Section(
        "fanout_250", "fanout.py --hosts 250 --only ^(launch.exec,.paramiko|OpenSSH,.curve25519|pdsh.*)$ --rounds 3"
    ),
    Section("fault_matrix", "tests/soak/fault_matrix.py"),
    Section("random_kills", "tests/soak/random_kills.py --count 300"),
    Section("checkpoint_kills", "tests/soak/checkpoint_kills.py"),
    Section("stalls", "tests/soak/stalls.py"),
    Section("verdicts", "tests/soak/verdicts.py"),
    Section("many_ranks", "many_ranks.py"),
    Section("output", "output.py --rounds 3"),
    Section("journal_reading", "journal_reading.py"),
    Section("step_time_mlp", "step_time.py --models mlp --rounds 6", 2),
    Section("step_time_gpt", "step_time.py --models gpt --rounds 5", 2),
    Section("step_time_gpt100m", "step_time.py --models gpt100m --rounds 3", 2),
    Section("pipeline", "pipeline.py --rounds 4 --width 512", 2),
    Section(
        "pipeline_768",
        "pipeline.py --rounds 6 --width 768 --micro-batches 8"
        " --engines 'launch GPipe,launch 1F1B,torch GPipe,DeepSpeed'",
        2,
    ),
    Section("offload_time", "offload_time.py --rounds 6", 2),
    Section("speculative_update", "speculative_update.py", 1),
    Section("expert_parallel", "expert_parallel.py --rounds 2", 4),
    Section("hf_trainer", "hf_trainer.py"),
    Section("checkpoint_peers", "checkpoint_peers.py"),
    Section("checkpoint_time", "checkpoint_time.py --sizes 100 --rounds 4", 2),
    Section("checkpoint_time_500m", "checkpoint_time.py --sizes 500 --rounds 1 --without DeepSpeed", 2),
    Section("to_fp32", "to_fp32.py --rounds 2"),
    Section("parity_table", "parity_table.py --worst"),
    Section("architectures", "architectures.py"),
    Section("fuzz", "tests/soak/fuzz.py"),
    Section("checkpoint_fuzz", "tests/soak/checkpoint_fuzz.py"),
    Section("memory_table", "memory_table.py"),
    Section("rehearsal", "rehearsal.py"),
    Section("plan", "plan.py --rounds 12 --layers 3"),
    Section("journal", "journal.py", 2),
    Section("nvme", "nvme.py --seconds 0.5 --rounds 5"),
    Section("nvme_step", "nvme_step.py --rounds 7"),
    Section("growth", "growth.py"),
    Section("start_7b", "start_7b.py"),
    Section("pretrained_memory", "pretrained_memory.py"),
    Section("cpu_kernels", "cpu_kernels.py --rounds 9"),
    Section("onebit", "onebit.py", 2),
    Section("sequence_parallel", "sequence_parallel.py --rounds 2", 4),
    *(
        Section(
            f"tests_of_{suite}", f"peer_suites.py --suite {suite} --tests build/{suite} --real", is_only_by_name=True
        )
        for suite in ("deepspeed", "accelerate", "transformers")
    ),
    Section("scale", "scale_model.py --rounds 3", page=ROOT / "docs" / "scale.md"),
)


def assemble() -> str:
    """Return docs/benchmarks.md: the header, the figures of the first page, and what was measured of each section."""
    parts = [
        (ROOT / "benchmarks" / "header.md").read_text(),
        f"![The figures]({figures.PICTURE.name})",
        figures.summary(),
    ]
    for section in SECTIONS:
        if section.page is None:
            missing = f"## {section.name}\n\nNot measured yet: `make bench SECTION={section.name}`.\n"
            parts.append(section.output.read_text() if section.output.exists() else missing)
    return "\n".join(part.strip() + "\n" for part in parts)


def _write_page() -> None:
    PAGE.write_text(assemble())
    figures.write_picture()


def main() -> int:
    """Measure and write; return 1 when a script failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="; ".join(section.name for section in SECTIONS))
    parser.add_argument("--page", action="store_true", help="measure nothing")
    options = parser.parse_args()
    unknown = set(options.sections) - {section.name for section in SECTIONS}
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in SECTIONS)}")
    failed = []
    for section in SECTIONS:
        is_wanted = section.name in options.sections if options.sections else not section.is_only_by_name
        if is_wanted and not options.page:
            start_s = time.monotonic()
            code = section.measure()
            print(f"{section.name}: exit code {code} after {time.monotonic() - start_s:.0f} s", flush=True)
            failed += [section.name] * bool(code)
            _write_page()
    _write_page()
    if failed:
        print(f"failed, or found something out of bounds: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
