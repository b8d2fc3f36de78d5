"""`deepspeed.moe`, which the built-in engine does not have."""

raise ImportError(
    "the built-in engine has no expert parallelism: train the model's own experts with ZeRO stage 3 and"
    " set_z3_leaf_modules, or install DeepSpeed",
    name=__name__,
)
