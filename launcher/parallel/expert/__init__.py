"""Expert parallelism: ranks have different experts of a mixture, and tokens travel to the ranks of their experts.

Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding",
https://arxiv.org/abs/2006.16668, section 3; Rajbhandari et al., "DeepSpeed-MoE", https://arxiv.org/abs/2201.05596,
section 5.
"""
