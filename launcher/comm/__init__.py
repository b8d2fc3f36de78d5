"""Floor 1: process groups and collectives on flat buffers."""
