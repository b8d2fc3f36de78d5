"""What a checkpoint consists of, as plain data and bytes: trees of values, tensors, layouts, random numbers."""
