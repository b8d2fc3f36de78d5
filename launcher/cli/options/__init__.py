"""What can be typed: options, their types and what they mean together."""
