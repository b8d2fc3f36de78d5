"""Hostile input for every parser of the launcher: each gives a result or an error made for the user, and no traceback.

    python tests/soak/fuzz.py [--count 100000] [--seed 0] [--output FILE]

Arguments and folders are also given to a real `sh` in the way hosts get them, and must arrive unchanged. Writes a
section of docs/benchmarks.md; exit code 1 when anything went wrong, with the input that did it on standard error.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # what writes sections of pages
import click
from common import Section, argument_parser, table

from launcher.agent import wire
from launcher.base import env
from launcher.base.errors import LauncherError
from launcher.base.secrets import mask_arguments
from launcher.cli.commands.run import run as run_command
from launcher.cli.options.jobfile import read_job_file
from launcher.cluster.cluster import Cluster, Host
from launcher.cluster.cores import parse_core_list
from launcher.cluster.filters import select
from launcher.cluster.hostfile import parse_hostfile
from launcher.cluster.nodeset import expand, fold, parse_address
from launcher.plan.variables import parse_env_file
from launcher.schedulers.rank import scheduler_rank
from launcher.schedulers.slurm import parse_job_detail, parse_nodelist, read_allocation
from launcher.slurm.framing import DATA, LineReader, encode_lines
from launcher.slurm.lint import lint_script
from launcher.transport.command import AGENT_MODULE, agent_shell_command
from launcher.transport.ssh.config import Targets
from launcher.transport.ssh.options import SshOptions

_ECHO = "import os, sys; os.write(1, b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
_PER_SHELL = 50  # arguments given to one `sh`
# Pieces that mean something to some parser or to a shell, and bytes that mean nothing to any.
_PIECES = (
    *"\n\r\t\0 '\"`\\$#=@:,;-[](){}<>|&*?!~^%/.+_0123456789",
    *(
        "$()",
        "$(touch PWNED)",
        "`touch PWNED`",
        ";touch PWNED;",
        "${IFS}",
        "&&",
        "||",
        ">PWNED",
        "\n\n",
        "\r\n",
        "\\\n",
    ),
    *(
        "\x0b",
        "\x0c",
        "\x1b[2J",
        "\x85",
        "\u2028",
        "\u202e",
        "\ufeff",
        "é",
        "ß",
        "İ",
        "٣",
        "²",
        "🔥",
        "\udcff",
        "\ud800",
    ),
    *("0", "00", "-1", "1e9", "9" * 9, "9" * 20, "9" * 5000, "0x10", "nan", "inf", "1-3", "01-16", "3-1", "0-99999999"),
    *(
        "node",
        "node-a",
        "localhost",
        "127.0.0.1",
        "::1",
        "[::1]:22",
        "fe80::1%eth0",
        "user@",
        "slots=",
        "slots=4",
        "port=22",
    ),
    *("export ", "KEY=", "KEY=value", "A='b c'", "# comment", " #", "node[01-16]", "gpu[1-2,7],login", "[", "]", "[]"),
    *(
        "2(x3),1",
        "(x",
        "a100:4",
        "gpu:a100:2(IDX:0-1)",
        "Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES=gpu:4",
        "--token",
        "hf_" + "a" * 20,
    ),
    *(
        "script: s.py\n",
        "args: [a, b]\n",
        "options: {grace: 1}\n",
        "environment: {A: 1}\n",
        "config: {a: 1}\n",
        "&a [*a]",
        "*a",
    ),
    *(
        "!!binary x",
        "!!int x",
        "!!timestamp x",
        "!!float x",
        "!!bool x",
        "!!set {a}",
        "2001-01-01",
        "? a",
        "- ",
        ": ",
        "<<: ",
    ),
    *(
        "Host *\n",
        "HostName %h",
        "Port ",
        "User ",
        "ProxyJump ",
        "Match all\n",
        "Match exec true\n",
        "Include /dev/null\n",
        "%",
    ),
    *("IdentityFile ~/x", "ConnectTimeout ", "UserKnownHostsFile ", "None", "none"),
)
Case = Callable[[random.Random], object]


def text(chance: random.Random, most: int = 12) -> str:
    """Return hostile text."""
    words = chance.choices(_PIECES, k=chance.randint(0, most))
    if chance.random() < 0.2:
        words.append("".join(chr(chance.randrange(0x110000)) for _ in range(chance.randint(1, 8))))
    return chance.choice(("", "", " ", "\n")).join(words)


def argument(chance: random.Random) -> str:
    """Return what may stand in an argument list: anything that bytes without NUL decode to."""
    return os.fsdecode(text(chance).encode("utf-8", "replace").replace(b"\0", b"?") + chance.choice((b"", b"\xff\xfe")))


def mutated(chance: random.Random, *templates: str) -> str:
    """Return something valid with a few wounds, or nothing but hostile text."""
    if chance.random() < 0.1:
        return text(chance)
    result = chance.choice(templates)
    for _ in range(chance.choice((0, 0, 0, 0, 1, 1, 2, 4))):
        place, length = chance.randint(0, len(result)), chance.choice((0, 0, 1, 3))
        result = result[:place] + chance.choice((*_PIECES, result[place:])) + result[place + length :]
    return result


def _host(chance: random.Random) -> Host:
    return Host(chance.choice(("node-a", "node01", "::1", argument(chance)[:40] or "x")), (0, 1))


def _hostfile(chance: random.Random) -> object:
    lines = (
        "node-a slots=4",
        "user@node[01-16]:2222 slots=8 # x",
        "[::1]:22 slots=1",
        "gpu[1-2,7]-ib slots=2 port=22",
        "",
    )
    return parse_hostfile("\n".join(mutated(chance, *lines) for _ in range(chance.randint(1, 4))), "hosts")


def _filter(chance: random.Random) -> object:
    cluster = Cluster(
        (Host("node-a", (0, 1, 2, 3)), Host("node01", (0,)), Host("::1", (0, 1), "user"), Host("b", (0,)))
    )
    option = chance.choice(("include", "exclude"))
    numbers = {"num_nodes": chance.choice((0, 10**30)), "num_gpus": -1} if chance.random() < 0.1 else {}
    words = mutated(chance, "node-a", "node-a:0,2@node01", "[::1]:0-1@b", "user@::1", "node[01-01]")
    return select(
        cluster, include=words if option == "include" else "", exclude="" if option == "include" else words, **numbers
    )


def _slurm(chance: random.Random) -> object:
    names = [variable.name for variable in env.ALL if variable.name.startswith("SLURM_")]
    environ = {name: chance.choice(("1", "2", "0", "n[1-2]", "1(x2)", text(chance, 3))) for name in names}
    for name in chance.sample(names, chance.randint(0, 4)):
        del environ[name]
    task = chance.random() < 0.5
    return scheduler_rank(environ) if task else read_allocation(environ, num_slots=chance.choice((None, 2)))


def _nodelist(chance: random.Random) -> object:
    if chance.random() < 0.7:
        return parse_nodelist(mutated(chance, "node[01-04,7],login2", "a,b,c", "n[1-2]-[3-4]", "gpu1"))
    return parse_job_detail(
        mutated(chance, "Nodes=n[1-2] CPU_IDs=0-7 Mem=0 GRES=gpu:a100:4(IDX:0-3)", "  Nodes=a B GRES=")
    )


def _check_same(found: tuple[str, ...], names: tuple[str, ...]) -> None:
    if sorted(found) != sorted(names):
        raise AssertionError(f"{names} became {found}")


def _host_name(chance: random.Random) -> object:
    word = mutated(chance, "user@node[01-16]:2222", "::1", "[fe80::1%eth0]:22", "node-a", "a[1-3,7]b[01-02]")
    names = parse_address(word).names if chance.random() < 0.5 else expand(word)
    names = tuple(dict.fromkeys(name for name in names[:50] if len(name) < 256))
    again = fold(names)
    if all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]*", name) for name in names):
        _check_same(parse_nodelist(again), names)
    return again


def _environment_file(chance: random.Random) -> object:
    lines = ("KEY=value", "export KEY='a b' # c", 'A="b\\"c"', "# comment", "", "A=", "A = b #c")
    values = parse_env_file("\n".join(mutated(chance, *lines) for _ in range(3)), "file")
    if any("\0" in value or "\n" in value for value in values.values()):
        raise AssertionError("a value that no environment can hold")
    return values


def _job_file(chance: random.Random) -> object:
    path = Path("job.yaml")
    content = mutated(
        chance,
        "script: s.py\nargs: [--lr, 3e-4, true, null, 2001-01-01]\nenvironment: {A: 1, B: x}\n",
        "script: s.py\ncluster: {hostfile: h, exclude: a}\nresources: {num_gpus: 2}\noptions: {grace: 1.5}\n",
        "script: s.py\nconfig: {train_batch_size: 8, a: [1, 2.5, x]}\noptions: {env_file: [a, b], quiet: true}\n",
        "script: s.py\nconfig: {a: !!timestamp 2001-01-01, b: !!binary aGk=, c: !!set {x}}\n",
    )
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    return read_job_file(path, click.Context(run_command))


def _ssh_config(chance: random.Random) -> object:
    path = Path("ssh_config")
    lines = (
        *(
            "Host node-a",
            "Host *",
            "Match host node*",
            "HostName %h.x",
            "Port 22",
            "User u",
            "IdentityFile ~/.ssh/%h",
            "",
        ),
        *(
            "ProxyJump a,b@c:1",
            "ConnectTimeout 5",
            "UserKnownHostsFile 'a b'",
            "HostKeyAlias x",
            "Include x*",
            "Match final",
        ),
    )
    path.write_bytes("\n".join(mutated(chance, *lines) for _ in range(4)).encode("utf-8", "surrogatepass"))
    return Targets(SshOptions(ssh_config=path)).of(_host(chance))


def _arguments(chance: random.Random) -> object:
    words = [argument(chance) for _ in range(chance.randint(0, 6))]
    shown = mask_arguments(words)
    message = wire.Spawn(
        "job", [["script", "s.py", *words]], argument(chance), {"A": argument(chance)}, [{}], None, 1.0
    )
    decoder = wire.Decoder(expect_magic=False)
    data = wire.encode(message)
    cut = chance.randrange(len(data))
    if [*decoder.feed(data[:cut]), *decoder.feed(data[cut:])] != [message] or len(shown) != len(words):
        raise AssertionError("changed on the way")
    return shown


def _stream(chance: random.Random) -> object:
    """Damaged bytes where an agent's words are expected, and Slurm's lines around any bytes."""
    data = bytearray(wire.encode(wire.Output(1, "stdout", chance.randbytes(20))))
    data[chance.randrange(len(data))] = chance.randrange(256)
    found = list(wire.Decoder(expect_magic=False).feed(bytes(data)))
    body = chance.randbytes(chance.randint(0, 300))
    reader = LineReader()
    got = b"".join(line.body for line in reader.feed(encode_lines("n1", DATA, body)))
    if got != body:
        raise AssertionError("changed between lines")
    list(reader.feed(text(chance).encode("utf-8", "replace") + b"\n"))
    return found


def _batch_script(chance: random.Random) -> object:
    lines = (
        *(
            "#!/bin/bash",
            "#SBATCH --nodes=2 --gpus-per-node=8",
            "#SBATCH -t 20:00:00",
            "#SBATCH --ntasks-per-node 1",
            "",
        ),
        *(
            "srun launch train.py",
            "launch --num_gpus 4 train.py 'a b'",
            "#SBATCH --gres=gpu:a100:4",
            "exec launch x \\",
        ),
    )
    return lint_script("\n".join(mutated(chance, *lines) for _ in range(5)), "job.sh", Path("/"))


def _cores(chance: random.Random) -> object:
    return parse_core_list(mutated(chance, "0-15,32", "0", "1,2,3"))


CASES: dict[str, Case] = {
    "hostfiles": _hostfile,
    "include and exclude": _filter,
    "node lists": _nodelist,
    "Slurm environments": _slurm,
    "host names": _host_name,
    "environment files": _environment_file,
    "job files": _job_file,
    "batch scripts": _batch_script,
    "SSH configs": _ssh_config,
    "argument lists": _arguments,
    "streams": _stream,
    "core lists": _cores,
}


def through_a_shell(words: list[str]) -> str:
    """Give `words` to a real shell, quoted as commands for hosts are. Returns what went wrong."""
    line = shlex.join([sys.executable, "-c", _ECHO, *words])
    done = subprocess.run(["sh", "-c", line], capture_output=True, stdin=subprocess.DEVNULL)
    return "" if done.stdout == b"\0".join(map(os.fsencode, words)) else f"sh changed {words!r}: {done.stderr!r}"


def agent_in_a_shell(folder: str) -> str:
    """Let a real shell run the command that starts agents, with a hostile folder. Returns what went wrong."""
    command = agent_shell_command(python="echo", root=Path("/", folder))
    done = subprocess.run(["sh", "-c", command], capture_output=True, stdin=subprocess.DEVNULL)
    expected = b" " + os.fsencode(str(Path("/", folder))) + b" " + AGENT_MODULE.encode() + b"\n"
    return "" if done.stdout.endswith(expected) else f"sh changed {folder!r}: {done.stdout!r} {done.stderr!r}"


def _cpu_s() -> float:
    """Return the processor time of this process and of those that it has waited for, in seconds."""
    return sum(os.times()[:4])


def fuzz(name: str, count: int, seed: int) -> tuple[int, float, list[str]]:
    """Feed one parser. Returns how many inputs it refused, the seconds it took, and what went wrong."""
    refused, problems, start_s = 0, [], time.perf_counter()
    for number in range(count):
        begin_s = _cpu_s()
        try:
            CASES[name](random.Random(f"{seed} {name} {number}"))
        except LauncherError:
            refused += 1
        except Exception:  # noqa: BLE001  # finding these is the purpose
            problems.append(f"{name} {number}: {traceback.format_exc()}")
        if _cpu_s() - begin_s > 5.0:
            problems.append(f"{name} {number}: took {_cpu_s() - begin_s:.0f} s of a processor")
    return refused, time.perf_counter() - start_s, problems


def fuzz_shell(count: int, seed: int) -> tuple[int, float, list[str]]:
    """Feed `sh`; also look whether anything was executed."""
    chance, start_s = random.Random(seed), time.perf_counter()
    found = [through_a_shell([argument(chance) for _ in range(_PER_SHELL)]) for _ in range(count // _PER_SHELL)]
    found += [agent_in_a_shell(argument(chance)) for _ in range(count // _PER_SHELL)]
    if Path("PWNED").exists():
        found.append("something of the input was executed")
    return 0, time.perf_counter() - start_s, [problem for problem in found if problem]


def main() -> None:
    """Feed all, write what happened."""
    parser = argument_parser(__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="inputs, shared out to all parsers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    page = Section("Hostile input")
    share = max(1, options.count // len(CASES))
    rows, problems = [], []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        results = {name: (share, *fuzz(name, share, options.seed)) for name in CASES}
        results["arguments and folders through `sh`"] = (share, *fuzz_shell(share, options.seed))
        os.chdir("/")
    for name, (count, refused, seconds, found) in results.items():
        rows.append([name, f"{count:,}", f"{refused:,}", f"{seconds:.1f} s", str(len(found) or "none")])
        problems += found
    text = (
        f"Seed {options.seed}. A failure is what is neither a result nor an error made for the user; inputs for `sh`"
        " must come out of it\nunchanged.\n\n"
        f"{table(['parser', 'inputs', 'refused with a message', 'time', 'failures'], rows)}"
    )
    page.write(f"{sum(count for count, *_ in results.values()):,} inputs, each once", text, options.output)
    sys.stderr.write("\n".join(problems[:50]))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
