"""Ports for daemons that want to be told one."""

from __future__ import annotations

import random
import socket

# Below the kernel's own range for outgoing connections: no client takes the port between the look and its use. Drawn at
# random, so that tests that run at the same time draw different ones.
_PORTS = range(12_000, 32_000)
_random = random.SystemRandom()


def free_port() -> int:
    """Return a TCP port that is free on every address now."""
    while True:
        port = _random.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port
