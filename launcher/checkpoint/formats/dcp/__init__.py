"""Checkpoints of torch.distributed.checkpoint, of FSDP2 and torchtitan."""
