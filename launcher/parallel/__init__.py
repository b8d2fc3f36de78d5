"""Layer 4: models that several ranks compute together."""
