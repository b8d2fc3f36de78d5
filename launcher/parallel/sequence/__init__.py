"""Sequence parallelism: the ranks of a group hold parts of every sequence, and exchange them for heads in attention.

Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", https://arxiv.org/abs/2309.14509, section 3.
"""
