"""How long `launch` and its agents wait where no option says it: one value, so that one variable can scale it.

`LAUNCH_TIMEOUT_SCALE` multiplies every field: above 1 for machines that are slow or overloaded, below 1 in tests of
what happens when a wait is over. Times that the user chooses (`--lease`, `--grace`, `--hang-timeout`) and intervals of
heartbeats are not scaled.
"""

from __future__ import annotations

import functools
import os

from launcher.base import env
from launcher.base.errors import UsageError
from launcher.base.record import Record


class Timeouts(Record):
    """Seconds."""

    connect_s: float = 10.0  # ConnectTimeout of SSH, where neither an option nor the SSH config sets it
    answer_s: float = 30.0  # an agent's first words, after its process was started
    goodbye_s: float = 15.0  # of a job's agents, beyond the grace of their ranks
    local_answer_s: float = 2.0  # of an agent on this machine, to a stop, beyond the grace: it is suspended
    exec_goodbye_s: float = 5.0  # the same for `launch exec` and `launch check`
    sweep_s: float = 15.0  # lost hosts, all together: most are dead, and each would take its connect timeout
    stacks_s: float = 5.0  # agents' answers to a request for stack traces
    native_stacks_s: float = 10.0  # the same where native stacks are asked for
    collectives_s: float = 1.5  # a rank's answer to its agent, which collectives it has entered
    py_spy_s: float = 2.0  # native stacks of the ranks of a host that do not answer; those that are asked for: twice
    stacks_command_s: float = 15.0  # `launch stacks`: the launcher of the job, and its agents
    trace_notice_s: float = 2.0  # `launch trace`: until all ranks know from which step on they are traced
    kill_command_s: float = 30.0  # `launch kill`: beyond the grace, for a launcher that still sweeps lost hosts
    torch_facts_s: float = 120.0  # `launch report`: the first import of torch from a cold network disk
    version_s: float = 10.0  # of a program, to print its version
    peer_connect_s: float = 5.0  # `launch check`: one host to another, which may not listen yet
    check_round_s: float = 120.0  # each round of `launch check`: Python may come from a cold network disk
    disk_stall_s: float = 30.0  # one write to the run folder, at the end of a run, or to the list of jobs
    last_words_s: float = 2.0  # the exit status of an agent that could not start
    kill_s: float = 10.0  # a killed process in an uninterruptible wait, before it is left to the kernel
    srun_silence_s: float = 30.0  # of a node; its relay sends something every 5 s
    srun_sweep_silence_s: float = 10.0  # of a lost node that is asked once more
    srun_farewell_s: float = 30.0  # of the launcher, which reads what a relay has left
    other_ranks_s: float = 60.0  # of a training, after a caught exception: they have to continue together
    order_check_s: float = 10.0  # one wait of a training for other ranks, before they compare their collectives
    host_exchange_s: float = 60.0  # a few bytes between hosts that have all begun to exchange facts of a step
    slurm_query_s: float = 60.0  # scontrol and squeue: a busy controller answers late
    slurm_silence_s: float = 600.0  # of a controller that does not answer, while a job is waited for
    shared_disk_s: float = 60.0  # until a shared disk shows what a job has written at its end

    def scaled(self, factor: float) -> Timeouts:
        """Return all of them times `factor`."""
        return Timeouts(**{name: value * factor for name, value in self.as_dict().items()})


@functools.cache
def timeouts() -> Timeouts:
    """Return the values in force in this process. Raises: UsageError for a scale that is not a usable number."""
    text = os.environ.get(env.TIMEOUT_SCALE.name, "1")
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0.001 <= factor <= 1000:
        raise UsageError(
            f"{text!r} is not a number from 0.001 to 1000",
            where=env.TIMEOUT_SCALE.name,
            hint="it multiplies how long launch waits, such as 2 on a slow machine; unset it for the defaults",
        )
    return Timeouts().scaled(factor)
