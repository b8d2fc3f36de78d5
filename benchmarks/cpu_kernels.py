"""How fast the C++ optimizer kernels are: beside torch's fused ones, DeepSpeedCPUAdam and loops of the same traffic.

    python benchmarks/cpu_kernels.py [--rounds 9] [--numel-mi 64] [--threads 1,2] [--output FILE]

A loop of the same traffic is compiled here with `cc -O3 -march=native`: it reads and writes what the rule does, and
computes next to nothing. All candidates of a case work on the same memory, in turns.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from common import NOT_INSTALLED, Section, argument_parser, measure_in_turns, median, rounds_text, spread, table
from torch import Tensor

from launcher.kernels.api import Adagrad, Adam, Lamb, Lion, Rule, Sgd, Span
from launcher.kernels.cpu import CpuKernel, cpu_kernel_status

LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01
ADAM = Adam(LR, BETA1, BETA2, EPS, DECAY, step=10)
LAMB = Lamb(LR, BETA1, BETA2, EPS, DECAY, step=10)
OURS, LOOP = "launch", "loop of the same traffic"
LOOPS_SOURCE = """
#include <stdint.h>
#include <string.h>
#define EACH _Pragma("omp parallel for num_threads(threads) schedule(static)") for (int64_t i = 0; i < n; ++i)
static inline float wide(uint16_t h) { uint32_t u = (uint32_t)h << 16; float f; memcpy(&f, &u, 4); return f; }
static inline uint16_t top(float f) { uint32_t u; memcpy(&u, &f, 4); return u >> 16; }
#define ARGS int64_t n, int threads, float *restrict p, float *restrict m, float *restrict v
void two_states(ARGS, const float *restrict g, uint16_t *restrict w) {
  EACH { m[i] = m[i] * .9f + g[i] * .1f; v[i] = v[i] * .9f + g[i] * g[i] * .1f; p[i] = p[i] * .9f + m[i] * v[i]; }
}
void two_states_16(ARGS, const uint16_t *restrict g, uint16_t *restrict w) {
  EACH {
    float x = wide(g[i]);
    m[i] = m[i] * .9f + x * .1f; v[i] = v[i] * .9f + x * x * .1f; p[i] = p[i] * .9f + m[i] * v[i]; w[i] = top(p[i]);
  }
}
void one_state(ARGS, const float *restrict g, uint16_t *restrict w) {
  EACH { m[i] = m[i] * .9f + g[i] * g[i] * .1f; p[i] = p[i] * .9f + m[i] * g[i]; }
}
void lamb(ARGS, const float *restrict g, uint16_t *restrict w) {
  EACH { m[i] = m[i] * .9f + g[i] * .1f; v[i] = v[i] * .9f + g[i] * g[i] * .1f + p[i] * 1e-9f; }
  EACH { p[i] = p[i] * .9f + m[i] * v[i]; }
}
float norm(ARGS, const float *restrict g, uint16_t *restrict w) {
  float sum = 0;
  _Pragma("omp parallel for simd num_threads(threads) schedule(static) reduction(+ : sum)")
  for (int64_t i = 0; i < n; ++i) sum += g[i] * g[i];
  return sum;
}
"""


@dataclass(frozen=True)
class Memory:
    """What one case works on; all candidates share it."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    grad_16: Tensor
    param_16: Tensor


@dataclass(frozen=True)
class Case:
    """One row group of the page."""

    title: str
    loop: str
    num_bytes: int  # read and written, an element
    launch: Callable[[CpuKernel, Memory], None]
    peers: tuple[str, ...] = ()
    is_16bit: bool = False


def _update(rule: Rule) -> Callable[[CpuKernel, Memory], None]:
    def run(kernel: CpuKernel, memory: Memory) -> None:
        kernel.update([Span(rule, memory.master, memory.grad, _states(rule, memory))])

    return run


def _states(rule: Rule, memory: Memory) -> tuple[Tensor, ...]:
    if isinstance(rule, Adagrad):
        return (memory.exp_avg_sq,)  # a sum of squares
    return (memory.exp_avg, memory.exp_avg_sq)[: len(rule.STATES)]


def _mixed(kernel: CpuKernel, memory: Memory) -> None:
    kernel.update([Span(ADAM, memory.master, memory.grad_16, _states(ADAM, memory), memory.param_16)])


def _lamb(kernel: CpuKernel, memory: Memory) -> None:
    span = Span(LAMB, memory.master, memory.grad, _states(LAMB, memory))
    kernel.lamb_moments([span])
    kernel.update([replace(span, rule=replace(LAMB, trust_ratio=0.5))])


CASES = (
    Case("AdamW, all fp32", "two_states", 28, _update(ADAM), ("torch.optim.AdamW", "DeepSpeedCPUAdam")),
    Case(
        "AdamW, bf16 gradient in, fp32 states, bf16 weight out", "two_states_16", 28, _mixed,
        ("torch.optim.AdamW", "DeepSpeedCPUAdam"), is_16bit=True,
    ),
    Case("Adagrad", "one_state", 20, _update(Adagrad(LR, EPS, 0.0, 0.0, 10)), ("torch.optim.Adagrad",)),
    Case("Lion", "one_state", 20, _update(Lion(LR, BETA1, BETA2, DECAY))),
    Case("SGD with momentum", "one_state", 20, _update(Sgd(LR, 0.9, 0.0, 0.0, False, False)), ("torch.optim.SGD",)),
    Case("LAMB, both passes", "lamb", 40, _lamb),
    Case("norm and overflow", "norm", 4, lambda kernel, memory: kernel.sum_of_squares([memory.grad]) and None),
)  # fmt: skip


def compile_loops(folder: str) -> ctypes.CDLL:
    """Compile the loops of the same traffic with the system's C compiler."""
    source, library = Path(folder, "loops.c"), Path(folder, "loops.so")
    source.write_text(LOOPS_SOURCE)
    command = ["cc", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def make_memory(numel: int) -> Memory:
    """Touch every page once, on as many threads as will work on it."""
    grad = torch.randn(numel) * 1e-2
    arrays = [torch.zeros(numel).add_(value) for value in (1.0, 1e-3, 1e-4)]
    return Memory(*arrays, grad, grad.bfloat16(), arrays[0].bfloat16())


def peer(name: str, memory: Memory) -> torch.optim.Optimizer | None:
    """Build a peer's optimizer over the shared memory; None where it is not installed or does not build."""
    param = torch.nn.Parameter(memory.master)
    param.grad = memory.grad
    moments = {"exp_avg": memory.exp_avg, "exp_avg_sq": memory.exp_avg_sq}
    options = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": DECAY}
    optimizer: torch.optim.Optimizer
    if name == "DeepSpeedCPUAdam":
        try:
            with contextlib.redirect_stdout(sys.stderr):  # its log does not belong on the page
                from deepspeed.ops.adam import DeepSpeedCPUAdam

                optimizer = DeepSpeedCPUAdam([param], **options)
        except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:  # no package, compiler, ninja
            print(f"without DeepSpeedCPUAdam: {error}", file=sys.stderr)
            return None
        optimizer.state[param] = {"step": 10, **moments}
    elif name == "torch.optim.AdamW":
        optimizer = torch.optim.AdamW([param], fused=True, **options)
        optimizer.state[param] = {"step": torch.tensor(10.0), **moments}
    elif name == "torch.optim.Adagrad":
        optimizer = torch.optim.Adagrad([torch.nn.Parameter(torch.zeros(1))], lr=LR, eps=EPS, fused=True)
        optimizer.param_groups[0]["params"] = [param]
        optimizer.state[param] = {"step": torch.tensor(10.0), "sum": memory.exp_avg_sq}
    else:
        optimizer = torch.optim.SGD([param], lr=LR, momentum=0.9, fused=True)
        optimizer.state[param] = {"momentum_buffer": memory.exp_avg}
    return optimizer


def _peer_step(optimizer: torch.optim.Optimizer, case: Case, memory: Memory) -> Callable[[], None]:
    def step() -> None:
        if case.is_16bit:
            memory.grad.copy_(memory.grad_16)
        optimizer.step()
        if case.is_16bit:
            memory.param_16.copy_(memory.master)

    return step


def _timed(function: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        start_s = time.perf_counter()
        function()
        return time.perf_counter() - start_s

    return run


def candidates(
    case: Case, memory: Memory, kernel: CpuKernel, loops: ctypes.CDLL, threads: int
) -> dict[str, Callable[[], float]]:
    """Return what is measured in one case."""
    grad = memory.grad_16 if case.is_16bit else memory.grad
    arrays = (memory.master, memory.exp_avg, memory.exp_avg_sq, grad, memory.param_16)
    pointers = [ctypes.c_void_p(array.data_ptr()) for array in arrays]
    numel = ctypes.c_int64(memory.master.numel())
    found = {
        OURS: _timed(lambda: case.launch(kernel, memory)),
        LOOP: _timed(lambda: getattr(loops, case.loop)(numel, threads, *pointers)),
    }
    for name in case.peers:
        optimizer = peer(name, memory)
        if optimizer is not None:
            found[name] = _timed(_peer_step(optimizer, case, memory))
    return found


def rows(case: Case, samples: dict[str, list[float]], numel: int) -> list[list[str]]:
    """Return one row for each candidate."""
    loop_s = median(samples[LOOP])
    peers = [median(values) for name, values in samples.items() if name not in (OURS, LOOP)]
    found = []
    for name, values in samples.items():
        milliseconds, seconds = [1e3 * value for value in values], median(values)
        against_peer = f"{min(peers) / seconds:.2f}" if name == OURS and peers else ""
        found.append(
            [
                name,
                f"{1e3 * seconds:.1f} ms",
                spread(milliseconds),
                f"{case.num_bytes * numel / seconds / 1e9:.1f} GB/s" if name in (OURS, LOOP) else "",
                f"{loop_s / seconds:.2f}",
                against_peer,
            ]
        )
    return found + [[name, NOT_INSTALLED] for name in case.peers if name not in samples]


def main() -> None:
    """Measure and write a section of docs/benchmarks.md."""
    parser = argument_parser(__doc__, rounds=9)
    parser.add_argument("--numel-mi", type=int, default=64, help="parameters, in units of 2^20; default: %(default)s")
    parser.add_argument("--threads", default="1,2", help="default: %(default)s")
    parser.add_argument("--cases", default="", help="only cases whose title holds this")
    options = parser.parse_args()
    status = cpu_kernel_status()
    if status.kernel is None:
        raise SystemExit(f"no C++ kernel: {status.reason}")
    page = Section("Optimizer kernels on the CPU", "torch", "deepspeed")
    numel = options.numel_mi << 20
    memory = make_memory(numel)
    parts = [
        f"{options.numel_mi} Mi parameters, {status.kernel.name}. Ratios: how many times as fast as the loop of the"
        " same traffic, and as the best peer.\nWith bf16 the peers convert the gradient before their step, and the"
        " weights after it."
    ]
    with tempfile.TemporaryDirectory() as folder:
        loops = compile_loops(folder)
        for threads in map(int, options.threads.split(",")):
            torch.set_num_threads(threads)
            parts.append(f"### {threads} thread{'s'[: threads > 1]}")
            for case in CASES:
                if options.cases in case.title:
                    samples = measure_in_turns(candidates(case, memory, status.kernel, loops, threads), options.rounds)
                    header = [case.title, "time", "quartiles", "traffic", "over the loop", "over the best peer"]
                    parts.append(table(header, rows(case, samples, numel)))
    page.write(rounds_text(options.rounds) + "; ratios of medians", "\n\n".join(parts), options.output)


if __name__ == "__main__":
    main()
