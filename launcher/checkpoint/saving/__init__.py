"""The save path: what a rank writes, and how ranks make a checkpoint of it, at once or in a thread."""
