"""`deepspeed.runtime.sequence_parallel`, which the built-in engine does not have."""

raise ImportError(
    "the built-in engine has no sequence parallelism (Ulysses): use activation checkpointing or ZeRO stage 3 for long"
    " sequences, or install DeepSpeed",
    name=__name__,
)
