"""Layer 0: errors, suggestions, units, environment names, files. Standard library only."""
