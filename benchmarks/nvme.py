"""Read and write rates of a swap file in turns with fio, at the same block size and queue depth.

python benchmarks/nvme.py [--folder .] [--size 1GiB] [--seconds 1] [--rounds 7] > section.md
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from common import machine_line, measure_in_turns, median, spread, table

from launcher.base.units import format_bytes, parse_bytes
from launcher.storage.measure import DiskMeter
from launcher.storage.store import AioSettings

# The section of the DeepSpeed documentation, its defaults, and what disks like best.
SETTINGS = (AioSettings(256 << 10, 32, 1), AioSettings(1 << 20, 8, 1), AioSettings(1 << 20, 32, 1))
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


def measure(meter: DiskMeter, file: Path, settings: AioSettings, options: argparse.Namespace) -> list[list[str]]:
    """Return the rows of one setting."""
    ours = {"read": meter.read_rate, "write": meter.write_rate}
    candidates: dict[str, Callable[[], float]] = {}
    for direction, rate in ours.items():
        candidates[f"fio {direction}"] = lambda way=direction: fio_rate(file, way, settings, options.seconds)
        candidates[f"launch {direction}"] = lambda rate=rate: rate(settings, options.seconds)
    samples = {name: [value / 1e9 for value in v] for name, v in measure_in_turns(candidates, options.rounds).items()}
    rows = []
    for direction in ours:
        launch, fio = samples[f"launch {direction}"], samples[f"fio {direction}"]
        cells = [f"{median(values):.2f} ({spread(values)})" for values in (launch, fio)]
        block = format_bytes(settings.block_size_bytes)
        ratio = f"**{median(launch) / median(fio):.2f}**"
        rows.append([f"{direction}, {block} × {settings.num_requests}", *cells, ratio])
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=".", help="on the disk to be measured")
    parser.add_argument("--size", type=parse_bytes, default=1 << 30, help="of each of the two files")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print("## Disk\n")
    if shutil.which("fio") is None:
        print("Not measured: fio is not installed (`apt-get install fio`).\n")
        return
    rows = []
    meter = DiskMeter(options.folder, options.size)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        try:
            meter.fill(_FILL_S)
            file = Path(folder) / "fio"
            with file.open("wb") as stream:
                for _ in range(meter.size_bytes >> 20):
                    stream.write(os.urandom(1 << 20))
                stream.flush()
                os.fsync(stream.fileno())
            for settings in SETTINGS:
                rows += measure(meter, file, settings, options)
        finally:
            meter.close()
    print(machine_line())
    print(
        f"Read and written over and over: {format_bytes(meter.size_bytes)} on {filesystem(options.folder)}; GB/s, ",
        end="",
    )
    print(f"medians and quartiles of {options.rounds} rounds in turns, {options.seconds:g} s each, O_DIRECT; ", end="")
    print("`python benchmarks/nvme.py`.\n")
    print(table(["", "launch", "fio, libaio", "launch / fio"], rows))
    print()


def filesystem(folder: str) -> str:
    """Return the type of the file system."""
    command = ["stat", "--file-system", "--format=%T", folder]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
