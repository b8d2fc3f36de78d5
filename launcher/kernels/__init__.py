"""Fused optimizer kernels over flat shards: plain torch as the truth, C++ on CPUs, Triton on GPUs."""
