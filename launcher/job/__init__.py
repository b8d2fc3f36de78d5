"""Layer 5: a plan is run to its end: the controller and what it owns."""
