"""Layer 3: how an agent is reached on a host: a subprocess or an SSH channel."""
