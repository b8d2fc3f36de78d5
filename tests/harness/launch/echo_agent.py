"""Stand-in for the agent in transport tests; the first input line says what to do, the rest is its data."""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Run one order: echo, count, exit N, die, noise, stay, argv."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    order, *arguments = source.readline().decode().split()
    if order == "echo":
        while chunk := source.read1(65536):
            sink.write(chunk)
            sink.flush()
        return 0
    if order == "exit":
        print("leaving as told", file=sys.stderr)
        return int(arguments[0])
    if order == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if order == "noise":  # more stderr than any pipe or window holds, before the first byte of stdout
        for number in range(200_000):
            sys.stderr.write(f"noise line {number} {'x' * 60}\n")
        sink.write(b"done\n")
        return 0
    if order == "pid":
        sink.write(f"{os.getpid()} {os.getsid(0)} {' '.join(sys.argv)}\n".encode())
        sink.flush()
        source.read()
        return 0
    return 2
