"""Layer 5: `initialize()` and the Engine users hold."""
