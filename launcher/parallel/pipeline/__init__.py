"""Pipeline parallelism: a model divided into stages of consecutive layers, one or several on each rank.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
https://arxiv.org/abs/1811.06965; Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", https://arxiv.org/abs/2104.04473, section 2.2.
"""
