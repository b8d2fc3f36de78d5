"""What jobs with Lightning import once for all of them: see `harness.train.forked`."""

import sys
from importlib import import_module
from pathlib import Path

from launcher.compat import install

sys.path.append(str(Path(sys.prefix) / "lightning"))
install()  # before Lightning, which looks for deepspeed when it is imported
for name in ("lightning.pytorch", "lightning.fabric"):
    import_module(name)
