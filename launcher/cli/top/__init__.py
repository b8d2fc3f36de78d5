"""`launch top`: jobs on a screen, or as one frame of text."""
