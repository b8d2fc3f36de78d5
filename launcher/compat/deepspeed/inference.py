"""`deepspeed.inference`, which the built-in engine does not have."""

raise ImportError(
    "the built-in engine has no inference kernels: call deepspeed.initialize() without an optimizer, or install"
    " DeepSpeed",
    name=__name__,
)
