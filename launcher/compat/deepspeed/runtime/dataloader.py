"""`deepspeed.runtime.dataloader`: the loader of `initialize(training_data=...)`, and one without an end."""

from launcher.compat.repeating import RepeatingLoader
from launcher.engine.data import DistributedLoader as DeepSpeedDataLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
