"""Layer 5: from what a user asks for to the plan of a run; nothing is started."""
