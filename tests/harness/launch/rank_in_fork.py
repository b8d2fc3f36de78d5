"""A rank that `launch` starts, and whose script runs in a fork of a process which has imported torch.

    launch OPTIONS rank_in_fork.py SCRIPT ARGUMENTS   with the variable that `harness.launch.forked_ranks.in_forks` sets

This process has the rank's place below the agent. It passes its signals on to the fork, which writes to its output and
leaves its error record, and ends as the fork does; one that kills its agent finds it in TEST_AGENT_PID, as it is no
child of that. Standard library only, and little of it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

SOCKET_NAME = "TEST_FORKS_SOCKET"
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[SOCKET_NAME])
        environ = {**os.environ, "TEST_AGENT_PID": str(os.getppid())}
        request = {"argv": sys.argv[1:], "cwd": os.getcwd(), "environ": environ}
        socket.send_fds(server, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
        with server.makefile() as answers:
            pid = int(answers.readline())
            for number in _PASSED_ON:
                signal.signal(number, lambda number, _frame: os.kill(pid, number))
            code = int(answers.readline() or 1)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)  # the record of what went wrong is the fork's


if __name__ == "__main__":
    main()
