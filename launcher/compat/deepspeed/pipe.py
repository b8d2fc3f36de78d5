"""`deepspeed.pipe`, which the built-in engine does not have."""

raise ImportError(
    "the built-in engine has no pipeline parallelism: use ZeRO stage 3, or install DeepSpeed", name=__name__
)
