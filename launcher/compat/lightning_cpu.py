"""Lets Lightning's DeepSpeed strategies use the engine on a machine without accelerators.

The strategies of `Trainer` and of `Fabric` refuse every accelerator but CUDA's, and then want the indices of the
devices to be the local ranks: the CPU has none. The engine trains on CPUs.
"""

from __future__ import annotations

import functools
from typing import Any


def change(module: Any) -> None:
    """Have `DeepSpeedStrategy` of a module of Lightning take the CPU, too."""
    strategy = module.DeepSpeedStrategy
    set_up, validate = strategy.setup_environment, module._validate_device_index_selection

    @functools.wraps(set_up)
    def set_up_on_cpu(self: Any) -> None:
        if {device.type for device in self.parallel_devices or ()} == {"cpu"}:
            super(strategy, self).setup_environment()
        else:
            set_up(self)

    @functools.wraps(validate)
    def validate_but_cpus(parallel_devices: Any) -> None:
        validate([device for device in parallel_devices if device.type != "cpu"])

    strategy.setup_environment = set_up_on_cpu
    module._validate_device_index_selection = validate_but_cpus
