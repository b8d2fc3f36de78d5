"""What the server of forks imports once for all ranks: see `harness.train.ranks.torch_forks`."""

import gc
from importlib import import_module

# Searches for garbage leave out what is imported: they would copy the pages that forks share.
gc.disable()
# torch._dynamo: whoever makes a torch optimizer of their own loads it.
for name in ("torch", "torch.distributed", "torch._dynamo", "launcher.engine.build"):
    import_module(name)
import_module("launcher.config.load").load_config({})  # the first config that a process reads takes 0.1 s of it
gc.freeze()
gc.enable()
