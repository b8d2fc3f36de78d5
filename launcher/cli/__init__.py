"""Layer 6: the click commands; the only place that prints."""
