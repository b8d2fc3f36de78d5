"""What jobs with transformers import once for all of them: see `harness.train.forked`."""

from importlib import import_module

from launcher.compat import install

install()  # before transformers, which looks for deepspeed when it is imported
for name in ("transformers.trainer", "transformers.models.llama.modeling_llama"):
    import_module(name)
