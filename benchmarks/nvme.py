"""Read and write rates of a swap file in turns with fio, at the same block size and queue depth.

python benchmarks/nvme.py [--folder .] [--size 1GiB] [--seconds 1] [--rounds 7] [--output FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import shutil
import subprocess
import tempfile
from functools import partial
from pathlib import Path

from common import NOT_INSTALLED, Section, argument_parser, measure_in_turns, median, rounds_text, spread, table

from launcher.base.units import format_bytes, parse_bytes
from launcher.storage.measure import DiskMeter
from launcher.storage.store import AioSettings

# The section of the DeepSpeed documentation, its defaults, and what disks like best.
SETTINGS = (AioSettings(256 << 10, 32, 1), AioSettings(1 << 20, 8, 1), AioSettings(1 << 20, 32, 1))
SMALL, HUGE = "launch, pages of 4 KiB", "launch, huge pages"
_FILL_S = 60.0


def fio_rate(file: Path, direction: str, settings: AioSettings, seconds: float) -> float:
    """Return fio's bytes per second. direction: read or write."""
    command = [
        "fio", "--name=nvme", f"--filename={file}", f"--rw={direction}", "--direct=1", "--ioengine=libaio",
        f"--bs={settings.block_size_bytes}", f"--iodepth={settings.num_requests}", f"--size={file.stat().st_size}",
        "--overwrite=1", "--time_based", f"--runtime={round(1000 * seconds)}ms", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["jobs"][0][direction]["bw_bytes"])


def small_pages(num_bytes: int) -> memoryview:
    """Return memory as fio has it, and most programs: pages of 4 KiB, where `aligned_buffer` asks for huge ones."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memoryview(memory)


def rate(meter: DiskMeter, direction: str, settings: AioSettings, options: argparse.Namespace) -> float:
    """Return our bytes per second."""
    measured = meter.read_rate if direction == "read" else meter.write_rate
    return measured(settings, options.seconds)


def measure(
    meters: dict[str, DiskMeter], file: Path, settings: AioSettings, options: argparse.Namespace
) -> list[list[str]]:
    """Return the rows of one setting."""
    rows = []
    for direction in ("read", "write"):
        candidates = {name: partial(rate, meter, direction, settings, options) for name, meter in meters.items()}
        if shutil.which("fio"):
            candidates["fio"] = partial(fio_rate, file, direction, settings, options.seconds)
        samples = measure_in_turns(candidates, options.rounds)
        found = {name: [value / 1e9 for value in values] for name, values in samples.items()}
        cells = [f"{median(values):.2f} ({spread(values)})" for values in found.values()]
        ratios = [NOT_INSTALLED]
        if "fio" in found:
            # Only with pages like fio's is it the same work: that ratio is the bold one.
            same, huge = (median(found[name]) / median(found["fio"]) for name in (SMALL, HUGE))
            ratios = [f"**{same:.2f}**", f"{huge:.2f}"]
        block = format_bytes(settings.block_size_bytes)
        rows.append([f"{direction}, {block} × {settings.num_requests}", *cells, *ratios])
    return rows


def main() -> None:
    """Measure and write."""
    parser = argument_parser(__doc__, rounds=7)
    parser.add_argument("--folder", default=".", help="on the disk to be measured")
    parser.add_argument("--size", type=parse_bytes, default=1 << 30, help="of each of the three files")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    options = parser.parse_args()
    page = Section("Disk")
    with contextlib.ExitStack() as stack:
        meters = {
            SMALL: DiskMeter(options.folder, options.size, small_pages),
            HUGE: DiskMeter(options.folder, options.size),
        }
        for meter in meters.values():
            stack.callback(meter.close)
            meter.fill(_FILL_S)
        size_bytes = meters[HUGE].size_bytes
        file = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder))) / "fio"
        write_noise(file, size_bytes)
        rows = [row for settings in SETTINGS for row in measure(meters, file, settings, options)]
    columns = ["", *meters, "fio, libaio", "pages of 4 KiB / fio", "huge pages / fio"]
    text = (
        f"{format_bytes(size_bytes)} on {filesystem(options.folder)}, read and written over and over,"
        f" {options.seconds:g} s each; GB/s with quartiles, O_DIRECT, block size × requests in flight.\n"
        "fio's memory has pages of 4 KiB, so the bold column is the fair comparison; the engine's own buffers ask for"
        " huge pages.\n\n"
        f"{table(columns, rows)}"
    )
    page.write(rounds_text(options.rounds) + "; ratios of medians", text, options.output)


def write_noise(file: Path, num_bytes: int) -> None:
    """Make fio's file, and wait until it is on the disk."""
    with file.open("wb") as stream:
        for _ in range(num_bytes >> 20):
            stream.write(os.urandom(1 << 20))
        stream.flush()
        os.fsync(stream.fileno())


def filesystem(folder: str) -> str:
    """Return the type of the file system."""
    done = subprocess.run(["df", "--output=fstype", folder], check=True, capture_output=True, text=True)
    return done.stdout.split()[-1]


if __name__ == "__main__":
    main()
