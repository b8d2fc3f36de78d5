"""Checkpoints written as DeepSpeed 0.19 writes them, without DeepSpeed: the real one loads these files."""
