"""Where every element of a model is: parameters, units, shards, and from one sharding to another. Arithmetic only."""
