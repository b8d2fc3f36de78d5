"""A script as the planner sees it: rehearsed, for its parameters, what it computes and its bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from launcher.base.errors import UsageError
from launcher.base.units import counted
from launcher.cli.commands.rehearse import AT_ONCE, run_rank
from launcher.cli.console import streams
from launcher.config.schema import Config
from launcher.planner.computing import Script, rehearsed_memory
from launcher.planner.estimate import Machines
from launcher.planner.memory import Workload
from launcher.planner.model import ModelFacts, Parameter
from launcher.planner.plan import Plan, Row, ranked
from launcher.planner.rehearsal import RankRehearsal, sizes_of


def facts_of_script(command: Sequence[str], machines: Machines) -> tuple[ModelFacts, Script, Config, int]:
    """Rehearse a script on these ranks as it is, and with its blocks recomputed or not, the other way.

    command: its kind, `script` or `module`, its name and arguments. Returns its parameters, what it computes, its
    config and the samples of a step of all ranks. Raises: UsageError for a script that cannot be rehearsed.
    """
    name = command[1]
    streams.say(f"rehearsing {name} as rank 0 of {machines.world_size}")
    first = rehearsed(command, machines, {})
    if first.error is not None or not first.params:
        raise UsageError(
            f"the script cannot be rehearsed: {(first.error or 'no engine was built').splitlines()[-1]}",
            where=name,
            hint="see more with launch rehearse",
        )
    if not sizes_of(first).is_data_alone:
        mesh = sizes_of(first).equation
        hint = "plan its model to choose a mesh: launch plan config.json"
        raise UsageError(f"the script asks for a mesh of its own: {mesh}", where=name, hint=hint)
    recomputes = first.engine is not None and first.engine.recomputes
    rehearsals = {recomputes: first}
    other = rehearsed(command, machines, {"activation_checkpointing": {"blocks": None if recomputes else True}})
    if other.error is None and other.engine is not None:  # a script that recomputes by itself does so in both
        rehearsals.setdefault(other.engine.recomputes, other)
    params = tuple(Parameter(*param) for param in first.params)
    model = ModelFacts(os.path.basename(name), "rehearsed", params)
    batch = first.micro_batch * first.num_micro_batches * machines.world_size
    return model, Script(Workload(1, 1), rehearsals), Config.model_validate(first.config), batch


def rehearsed(command: Sequence[str], machines: Machines, patch: dict[str, Any]) -> RankRehearsal:
    """Rehearse rank 0 of a script. patch: changes its config. Raises: LauncherError where it leaves no result."""
    wanted: dict[str, Any] = {
        "rank": 0, "world_size": machines.world_size, "gpus_per_node": machines.gpus_per_node, "num_steps": 2,
        "backend": "gloo" if machines.context_bytes == 0 else "nccl", "announced": {},
    }  # fmt: skip
    return run_rank(wanted, command, patch, verbose=False)


def rehearse_rows(found: Plan, command: Sequence[str], chosen: Sequence[Row]) -> Plan:
    """Return a plan whose chosen rows have the bytes of rehearsals: formulas are near, these are exact."""
    machines = found.question.machines
    per_node = machines.gpus_per_node
    streams.say(f"rehearsing {counted(len(chosen), 'setting')} for their bytes")

    def exact(row: Row) -> Row:
        one = rehearsed(command, machines, row.as_patch())
        if one.error is not None or one.micro_batch != row.micro_batch:
            return row
        memory = rehearsed_memory(one, row.memory.context)
        host, disk = memory.host * per_node, memory.disk * per_node
        return replace(row, memory=memory, host_per_node=host, disk_per_node=disk, is_rehearsed=True)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        exact_rows = dict(zip(map(id, chosen), pool.map(exact, chosen), strict=True))
    return ranked(found.question, [exact_rows.get(id(row), row) for row in found.rows])
