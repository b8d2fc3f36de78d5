"""Layer 5: one run as a whole: plan, controller, report."""
