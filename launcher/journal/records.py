"""The format of a journal: its files, the kinds of records, and their fields.

A run folder has `launcher.jsonl`, written by the launcher, and `rank_N.jsonl` of each rank that has something to say.
A restart has a folder of its own, `restart_1`, with the same files. Each line is one JSON object that begins with its
kind; the first of a file has the version of the format. Only the last line may be cut off, by a crash. Readers skip
what they do not know: fields and kinds may be added within a version. NaN and infinity are texts.
"""

from __future__ import annotations

import re
import sys

VERSION = 1
LAUNCHER_FILE = "launcher.jsonl"
RANK_FILE = re.compile(r"rank_(\d+)\.jsonl")
# Files stay small: each time that one has grown by so much, records that come at intervals come half as often.
DOUBLED_EVERY_BYTES = 16 << 20
# What a rank that is killed loses at most. Each write wakes the agent and the launcher, too: a millisecond together.
FLUSH_INTERVAL_S = 0.5

# What a rank does, in the order of reports. Times of phases exclude each other: together they are the whole time.
DATA, FORWARD, BACKWARD, COMMUNICATION, UPDATE, SAVE, GC, SCRIPT = PHASES = (
    "data", "forward", "backward", "communication", "update", "save", "gc", "script",
)  # fmt: skip
PHASE_DOCS = {
    DATA: "waiting for the next batch of a DataLoader",
    FORWARD: "the forward passes",
    BACKWARD: "the backward passes",
    COMMUNICATION: "waiting for collectives, beyond what ran beside computing",
    UPDATE: "the optimizer's update",
    SAVE: "saving and loading checkpoints, as far as the training waits for it",
    GC: "pauses of Python's garbage collector",
    SCRIPT: "everything else: the script's own work between the calls above",
}

# What trains: goodput is these seconds, of steps that were not done again after a restart, as a mean over ranks, of the
# seconds of the job. Without the engine the forward is part of the script's own work.
USEFUL = (FORWARD, BACKWARD, COMMUNICATION, UPDATE)
USEFUL_WITHOUT_ENGINE = (*USEFUL, SCRIPT)


def useful_phases(*, has_forward: bool) -> tuple[str, ...]:
    """Return the phases whose time trains. has_forward: records have the forward apart, as the engine's do."""
    return USEFUL if has_forward else USEFUL_WITHOUT_ENGINE


# kind -> field -> meaning.
_TIME = {"time_s": "when it was written, seconds since the epoch by the clock of that machine"}
LAUNCHER_RECORDS: dict[str, dict[str, str]] = {
    "job": {
        "version": "of the format",
        "job_id": "of the job",
        "restart": "how often the job had been started before",
        "monotonic_s": "the launcher's monotonic clock at `time_s`",
        "world_size": "number of ranks",
        "hosts": "name, ranks and transport of each host",
        "command": "what the ranks run, secrets masked",
        "cwd": "working directory",
        "variables": "names of the environment variables that ranks were given",
        "rungs": "how the ladder of --on-oom has changed the config, in order",
        "faults": "what is rehearsed in it: the values of --fault",
    },
    "environment": {
        "packages": "name and version of each Python package of the launcher's environment",
        "python": "version of Python",
        "code": "commit of the working directory, and whether files differed from it; null without git",
    },
    "clock": {"host": "name", "offset_s": "the launcher's monotonic clock minus that of the host"},
    "start": {"rank": "number", "pid": "of its process", "host": "name"},
    "progress": {
        "ranks": "of those that have progressed since the last record: rank, heartbeats, step or null, loss or null,"
        " phase, last step or null",
    },
    "raised": {"rank": "number", "type": "of the exception", "message": "its words"},
    "exit": {
        "rank": "number",
        "status": "exit code, or minus the signal number",
        "max_rss_bytes": "the most memory its process held",
    },
    "host_lost": {"host": "name", "reason": "what is known"},
    "notice": {"text": "a warning, or why the ranks are stopped"},
    "stopping": {"text": "why the ranks are stopped"},
    "stacks": {"path": "file of the stack traces"},
    "verdict": {
        "name": "of the rule",
        "severity": "`warning` or `critical`",
        "rank": "the rank it is about, or null",
        "host": "the host it is about, or null",
        "text": "one sentence with the evidence",
        "next": "what to do",
        "since_step": "the first step of the evidence, or null",
        "share": "of an iteration; null: it is no matter of time",
        "until_step": "the step at which it was gone; null: it holds",
    },
    "end": {
        "exit_code": "of the run",
        "duration_s": "of the run",
        "failure": "kind, host, rank, exit code and reason of the first failure; null: none",
    },
}
RANK_RECORDS: dict[str, dict[str, str]] = {
    "rank": {
        "version": "of the format",
        "rank": "number",
        "local_rank": "number on its host",
        "host": "name",
        "pid": "of the process",
        "monotonic_s": "the host's monotonic clock at `time_s`",
    },
    "torch": {"release": "of torch, which the script has imported: from here on its steps are followed"},
    "engine": {
        "config": "the config in force, one value for each key",
        "auto": "key, value and reason of each `auto`",
        "units": "label, number of elements and bytes of each unit of the model",
        "device": "`cpu`, or the name of the GPU",
        "torch": "version",
        "peak_flops": "of the device in this precision, FLOP/s; null where it is not known",
    },
    "step": {
        "step": "number of the last optimizer step in the record",
        "num_steps": "how many steps it sums up: steps shorter than 0.1 s share a record",
        "duration_s": "of these steps together",
        "slowest_s": "the longest one of them",
        "phases": "seconds of each phase",
        "loss": "mean of the last step's micro-batches on this rank; null: not known to the engine",
        "norm": "of the gradients of the last step before clipping; null: not known yet",
        "loss_scale": "of fp16, with which the last step was taken; null without",
        "lr": "learning rate of the last step",
        "samples": "of these steps, on this rank",
        "tokens": "of these steps, on this rank; 0 where inputs are no token numbers",
        "sent_bytes": "sent in collectives by this rank",
        "memory_bytes": "in use now: of the GPU's allocator, else resident",
        "peak_bytes": "the most so far",
        "skipped": "of these steps, how many updated nothing because gradients were not finite",
    },
    "flops": {
        "flops": "of one micro-batch of this rank, forward and backward, without recomputation",
        "micro_batches": "of an optimizer step",
    },
    "save": {"path": "of the checkpoint", "duration_s": "how long the training waited"},
    "sample": {
        "phase": "in which it is now",
        "resident_bytes": "memory of this process",
        "cpu_s": "processor time of this process so far",
        "cpu_wait_s": "how long, so far, the thread that waited most was ready to run without a processor; null where"
        " the kernel does not tell",
        "throttled": "why the clocks were lowered since the last sample; empty: they were not; null where that is not"
        " known",
        "energy_j": "used by the rank's device so far; null where the hardware does not tell",
        "gc_longest_s": "the longest pause of the garbage collector since the last sample",
    },
    "nonfinite": {
        "step": "number of the optimizer step",
        "what": "`loss` or `norm`; with a module `output` or `gradient`",
        "module": "the first module whose output, or parameter whose gradient, was not finite; null: not known",
        "last_finite": "the last step before it that was looked at, and was finite; null with a module",
    },
    "fault": {
        "name": "of the fault that is rehearsed from now on (`--fault`)",
        "step": "number of the step, or heartbeat, after which it was done",
    },
    "trace": {
        "step": "number of the last step that `launch trace` has recorded, which slows steps down",
        "num_steps": "how many it has recorded",
    },
    "log": {"values": "what the script gave to `launcher.log(...)`"},
    "dropped": {"num_records": "lost because the journal could not be written as quickly"},
}
for _records in (LAUNCHER_RECORDS, RANK_RECORDS):
    for _fields in _records.values():
        _fields.update(_TIME)


def reference() -> str:
    """Return docs/journal.md."""
    lines = [_HEAD, "", "| phase | what the rank does |", "|---|---|"]
    lines += [f"| `{name}` | {doc} |" for name, doc in PHASE_DOCS.items()]
    for title, kinds in ((f"`{LAUNCHER_FILE}`", LAUNCHER_RECORDS), ("`rank_N.jsonl`", RANK_RECORDS)):
        lines += ["", f"## Records of {title}"]
        for kind, fields in kinds.items():
            lines += ["", f"### {kind}", "", "| field | meaning |", "|---|---|"]
            lines += [f"| `{name}` | {doc} |" for name, doc in fields.items()]
    return "\n".join(lines) + "\n"


_HEAD = f"""# The journal of a run

Each run writes down what it does, into the folder of its logs: `{LAUNCHER_FILE}` has what the launcher saw, and
`rank_N.jsonl` what each rank did, step by step. It is what the panel, reports and verdicts are made of, and it is for
your own tools, too: JSON lines, version {VERSION}.

```sh
tail -n 1 runs/calm-otter-4f2a/rank_0.jsonl
jq -c 'select(.kind == "step") | [.step, .loss, .duration_s]' runs/calm-otter-4f2a/rank_0.jsonl
```

* Scripts with the engine get every field of `step`. Other scripts get steps too, counted by the first torch optimizer
  that takes one, with waits for a `DataLoader`, `backward()`, the update and `torch.save`; the forward is part of
  `script` there, and waiting for other ranks part of `backward`; collectives that
  the script itself waits for are `communication`.
* `launcher.log(step=step, accuracy=0.9)` adds values of your own, from any script that `launch` has started.
* Each line is one object that begins with its `kind`. It is written by a thread of its own, which no step waits for; a
  rank that is killed loses the last {FLUSH_INTERVAL_S:g} s. Only the last line of a file may be cut off.
* Ranks send their records to the launcher, so that all files are in one folder: once a second, with the heartbeats.
  What is on its way when a host is lost is lost with it. Times are those of the host that wrote; `clock` and the two
  clocks in `job` and `rank` bring them together.
* Steps shorter than 0.1 s share a record; with more than 64 ranks longer ones do, too. Each time that a file has grown
  by {DOUBLED_EVERY_BYTES >> 20} MiB, records come half as often: a journal stays small, however long the run.
* A restart has a folder of its own, `restart_1`. NaN and infinity are texts. Readers must skip kinds and fields that
  they do not know.
* Nothing in it is secret: arguments that look like secrets are masked, and of variables there are only names. The files
  are yours alone, as the logs are. `--no-journal` switches it off.

## Phases

The seconds in `phases` exclude each other and add up to `duration_s`. On a GPU they are the device's own, from events
that are asked later, never waited for."""

if __name__ == "__main__":
    sys.stdout.write(reference())
