"""Checkpoints of an engine: what each rank writes, how ranks agree, and how any number of ranks reads it again.

[Note: no world size in a checkpoint] What is saved is addressed by the name of a parameter and a range of its elements.
A rank writes a part of what it holds, such that each element is written once; it reads the elements it holds from
wherever they are. So stage, number of ranks, copies of shards and offload may all differ between save and load.
"""

from __future__ import annotations

from launcher.checkpoint.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]
