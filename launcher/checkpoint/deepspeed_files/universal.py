"""DeepSpeed's universal form: a folder of each trained parameter, which any number of ranks loads at any stage.

DeepSpeed reads neither buffers nor frozen parameters from it, and at stage 3 one group's hyper-parameters for all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from launcher.checkpoint.deepspeed_files.files import Content, DeepSpeedFiles
from launcher.checkpoint.deepspeed_files.plan import Member, whole
from launcher.checkpoint.formats.source import WEIGHT

# By stage, below 3 and at 3. Without weights: DeepSpeed takes counters, schedule and client state from it.
_MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


def universal_files(files: DeepSpeedFiles) -> Iterator[tuple[str, Content]]:
    """Yield name and content of the files; the content of one tensor is in memory at a time.

    files: of stage 3 and one rank. Raises: CheckpointError for experts, which DeepSpeed has no universal form of.
    """
    plan = files.plan
    if plan.layers:
        raise plan.error("DeepSpeed's universal checkpoints have no experts", "use --format deepspeed")
    for name in _MODEL_STATES:
        yield name, functools.partial(files.model_states, 0)
    yield "zero/optimizer_state.pt", functools.partial(_optimizer_state, files)
    for group in plan.groups(0):
        scalars = files.states.scalars(group.members)
        names = files.states.states(group.members)
        for member in group.members:
            folder = f"zero/{member.name}"
            yield f"{folder}/fp32.pt", functools.partial(_tensor, files, WEIGHT, member)
            for name in names:
                yield f"{folder}/{name}.pt", functools.partial(_tensor, files, name, member)
            if "step" in scalars:
                yield f"{folder}/step.pt", functools.partial(scalars.__getitem__, "step")


def _tensor(files: DeepSpeedFiles, key: str, member: Member) -> dict[str, Any]:
    return {"param": files.states.read(key, whole(member)).view(member.shape)}


def _optimizer_state(files: DeepSpeedFiles) -> dict[str, Any]:
    """Return what is common to all parameters, where each stage looks for it."""
    states, groups = files.states, files.plan.groups(0)
    saved = states.groups(groups, [1] * len(groups))
    scalars = states.scalars([member for group in groups for member in group.members])
    # Stage 3 gives the first group's values to all groups: what differs is left out, and stays as the script has it.
    common = {
        key: value for key, value in saved[0].items() if all(key in each and each[key] == value for each in saved)
    }
    inner = {"state": {0: {"step": scalars.get("step", 0)}}, "param_groups": [{**common, "params": [0]}]}
    return {**states.common(), "param_groups": saved, "optimizer_state_dict": inner}
