"""Checkpoints as they are found: ours, DeepSpeed's, and those of torch.distributed.checkpoint."""
