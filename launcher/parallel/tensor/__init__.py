"""Tensor parallelism: the ranks of a group hold parts of each layer, and compute every layer together.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
https://arxiv.org/abs/1909.08053, section 3.
"""
