"""Layer 1: the DeepSpeed JSON vocabulary as one schema; loading, checking, `"auto"`. No torch."""
