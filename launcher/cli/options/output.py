"""What `launch run` shows of its own and of the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import click

from launcher.cli.options.command import under
from launcher.cli.options.hosts import note_debugging


@dataclass(frozen=True)
class StreamSpec:
    """Streams of local ranks, as torchrun's --redirects and --tee name them: bit 1 is stdout, bit 2 stderr."""

    every: int = 0  # of every rank
    by_local_rank: Mapping[int, int] = field(default_factory=dict)  # in place of `every`

    def has(self, local_rank: int, stream: str) -> bool:
        """Whether a rank's "stdout" or "stderr" is among them."""
        return bool(self.by_local_rank.get(local_rank, self.every) & (1 if stream == "stdout" else 2))


NO_STREAMS = StreamSpec()


def streams(text: str) -> StreamSpec:
    """Read which streams: 0 to 3 for all ranks, or LOCAL_RANK:0..3 for some."""
    if text in ("0", "1", "2", "3"):
        return StreamSpec(int(text))
    found: dict[int, int] = {}
    for part in str(text).split(","):
        local_rank, _, bits = part.strip().partition(":")
        if not (local_rank.isascii() and local_rank.isdigit() and bits in ("0", "1", "2", "3")):
            raise click.BadParameter(f"expected 0 to 3, or such as 0:1,1:3 by local rank, got {str(text)!r:.80}")
        found[int(local_rank)] = int(bits)
    return StreamSpec(0, found)


def whole_list(text: str) -> tuple[int, ...]:
    """Read whole numbers, separated by commas."""
    parts = [part.strip() for part in str(text).split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise click.BadParameter(f"expected whole numbers such as 0,1, got {text!r:.80}")
    return tuple(map(int, parts))


LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_output = under("Output")

# All of them but --log-dir, which is the plan's.
OUTPUT = (
    _output(
        "-r",
        "--redirects",
        metavar="SPEC",
        type=streams,
        default="0",
        help="Streams that go to the log files only: 1 stdout, 2 stderr, 3 both; 0:1,1:3 by local rank. Default: 0.",
    ),
    _output(
        "-t",
        "--tee",
        metavar="SPEC",
        type=streams,
        default="0",
        help="Streams to show on the console even if --redirects hides them.",
    ),
    _output(
        "--local-ranks-filter",
        metavar="LIST",
        type=whole_list,
        help="Show the output of these local ranks only, such as 0,1. The log files have all.",
    ),
    _output("--no-prefix", is_flag=True, help="Do not prefix lines of the ranks with [rank]."),
    _output(
        "--log-level",
        type=click.Choice(LOG_LEVELS),
        metavar="LEVEL",
        default="info",
        callback=note_debugging,
        help="Least important messages of launch to show: debug (with the plan, and what -v shows), info, warning,"
        " error, critical. Default: info.",
    ),
    _output("-q", "--quiet", is_flag=True, help="The same as --log-level warning; a stricter one holds."),
    _output("--plain", is_flag=True, help="Show no status view on a terminal."),
    _output("--dry-run", is_flag=True, help="Print the plan and exit."),
    _output("--json", "as_json", is_flag=True, help="With --dry-run: print the plan as JSON."),
)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The values of these options, by name."""

    redirects: StreamSpec = NO_STREAMS
    tee: StreamSpec = NO_STREAMS
    local_ranks_filter: tuple[int, ...] | None = None
    no_prefix: bool = False
    log_level: str = "info"
    quiet: bool = False
    plain: bool = False

    @property
    def level(self) -> str:
        """The least important kind of message that is shown: the stricter one of both options."""
        return max("warning" if self.quiet else "debug", self.log_level, key=LOG_LEVELS.index)

    @property
    def wants_panel(self) -> bool:
        """Whether a terminal may show the panel: part of what `info` shows."""
        return not self.plain and self.level == "info"

    @property
    def shows_all(self) -> bool:
        """Whether nothing of any rank is hidden."""
        return self.redirects == NO_STREAMS and self.local_ranks_filter is None

    @property
    def local_ranks(self) -> dict[str, set[int]]:
        """The local ranks that options name, by option."""
        return {
            "--redirects": {*self.redirects.by_local_rank},
            "--tee": {*self.tee.by_local_rank},
            "--local-ranks-filter": {*(self.local_ranks_filter or ())},
        }

    def shows(self, local_rank: int, stream: str) -> bool:
        """Whether the console shows a rank's stream, "stdout" or "stderr"; its log file has it in any case."""
        if self.local_ranks_filter is not None and local_rank not in self.local_ranks_filter:
            return False
        return self.tee.has(local_rank, stream) or not self.redirects.has(local_rank, stream)
