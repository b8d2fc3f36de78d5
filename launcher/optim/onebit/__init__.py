"""Optimizers whose ranks, after a warm-up, exchange signs of momenta instead of gradients."""
