"""Damage checkpoints in every way, and load them: each is refused by name, or loads as it was saved.

    python tests/soak/checkpoint_fuzz.py [--count 10000] [--seed 0] [--output FILE]

Bits are flipped, files cut, extended, exchanged and removed; and files are rewritten with hostile content and checksums
that fit: names of files that lead out of the folder, headers of tensors that overlap or are huge, deep JSON, numbers
without end, values of other types. Every tensor and all other data are read then, as a load does. Whatever is raised
must be a CheckpointError that names a file of the checkpoint; what is read without one must be what was saved, unless
the checksums were made to fit. Nothing may be written, nothing outside of the folder opened, and memory must not grow.
Writes a section of docs/benchmarks.md; exit code 1 when anything went wrong.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # what writes sections of pages
import torch
from common import Section, argument_parser, table
from torch import nn

import launcher
from launcher.base.errors import CheckpointError
from launcher.checkpoint.formats.native import NativeSource
from launcher.checkpoint.values import tree
from launcher.checkpoint_files.blocks import digest_of
from launcher.checkpoint_files.manifest import MANIFEST

TAG = "global_step1"
GROWTH_BYTES = 64 * 2**20  # allowed of a whole run
DEEP = "[" * 5000 + "]" * 5000
HUGE = "9" * 5000
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 2**64, 10**30, -1.5, 1e308, float("nan"), "", "/etc/passwd", "../../outside",
    "rank-00000.safetensors\0", "manifest.json", "__class__", "float32", "\udcff", [], {}, [[]], [-1], {"$": "bytes"},
    {"$": "path", "of": ["posix", "/etc/passwd"]}, {"$": "tensor", "of": {"key": "x", "dtype": "save", "shape": [1]}},
    {"$": "numpy.ndarray", "of": {"key": "run/0", "dtype": "|O8", "shape": [2**40]}},
    {"$": "int", "of": "-" + "f" * 99},
)  # fmt: skip


def save_one(root: Path) -> Path:
    """Save a small run with values of all kinds. Returns the folder of its tag."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}, "steps_per_print": 0}
    engine = launcher.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.randn(4, 5)).square().mean())
    engine.step()
    state = {"epoch": 3, "pair": (1, 2.5), "bytes": b"x" * 999, "path": Path("a/b"), "best": torch.ones(3)}
    engine.save_checkpoint(root, client_state=state)
    engine.destroy()
    return root / TAG


def everything(folder: Path) -> dict[str, Any]:
    """Read all of a checkpoint. Returns it as values that compare by their content."""
    source = NativeSource(folder)
    try:
        found: dict[str, Any] = {"run": _comparable(vars(source.state), "run")}
        for name, stored in source.params.items():
            for key in ("weight", *stored.states):
                out = torch.empty(stored.numel)
                source.read(key, name, 0, out)
                found[f"{key}/{name}"] = out.numpy().tobytes()
            found[f"facts/{name}"] = _comparable(vars(stored), name)
            for state in source.whole_states(name):
                source.read_whole(state, name)
        for rank in range(2):
            found[f"private/{rank}"] = _comparable(source.private(rank, 1), "private")
        return found
    finally:
        source.close()


def _comparable(value: dict[str, Any], where: str) -> str:
    plain, tensors = tree.encode({**value, "scalars": None} if "scalars" in value else value, where)
    return json.dumps(plain) + "".join(f"{key} {each.tolist()}" for key, each in tensors.items())


# ---- damage that checksums find ----


def flip(chance: random.Random, folder: Path) -> None:
    """Change a bit."""
    path = _some_file(chance, folder)
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(chance: random.Random, folder: Path) -> None:
    """Cut a file off."""
    path = _some_file(chance, folder)
    os.truncate(path, chance.randrange(path.stat().st_size))


def extend(chance: random.Random, folder: Path) -> None:
    """Add bytes at the end."""
    with _some_file(chance, folder).open("ab") as file:
        file.write(chance.randbytes(chance.randint(1, 100)))


def insert(chance: random.Random, folder: Path) -> None:
    """Put bytes in between, or take some out."""
    path = _some_file(chance, folder)
    data = path.read_bytes()
    at = chance.randrange(len(data))
    more = chance.choice((b"", b"\0", b'"', b"{", b" ", b"\xff\xfe", chance.randbytes(8)))
    path.write_bytes(data[:at] + more + data[at + chance.randint(0, 8) :])


def exchange(chance: random.Random, folder: Path) -> None:
    """Have two files change places."""
    first, second = chance.sample(_files(folder), 2)
    between = folder / "between"
    first.rename(between)
    second.rename(first)
    between.rename(second)


def remove(chance: random.Random, folder: Path) -> None:
    """Remove a file, or put a folder, a link or nothing in its place."""
    path = _some_file(chance, folder)
    path.unlink()
    kind = chance.randrange(4)
    if kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(folder / "nowhere")
    elif kind == 3:
        path.touch()


# ---- hostile content, with checksums that fit ----


def hostile_manifest(chance: random.Random, folder: Path) -> None:
    """Rewrite the manifest."""
    plain = json.loads((folder / MANIFEST).read_bytes())["manifest"]
    _mutate(chance, plain)
    _write_manifest(folder, plain)


def hostile_json(chance: random.Random, folder: Path) -> None:
    """Rewrite a file of JSON that the manifest names."""
    path = chance.choice([path for path in _files(folder) if path.suffix == ".json" and path.name != MANIFEST])
    kind = chance.random()
    if kind < 0.1:
        text = chance.choice((DEEP, HUGE, f'{{"run": {DEEP}}}', f'{{"units": {HUGE}}}', "null", "[]", "\ud800", "{"))
        content = text.encode("utf-8", "surrogatepass")
    else:
        plain = json.loads(path.read_bytes())
        for _ in range(chance.choice((1, 1, 1, 3))):
            _mutate(chance, plain)
        content = json.dumps(plain).encode()
    path.write_bytes(content)
    _refresh(folder, path.name)


def hostile_header(chance: random.Random, folder: Path) -> None:
    """Rewrite the header of a file of tensors, and the checksum of it."""
    path = chance.choice([path for path in _files(folder) if path.suffix == ".safetensors"])
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    plain = json.loads(data[8 : 8 + length])
    _mutate(chance, plain)
    header = json.dumps(plain).encode().ljust(length)
    if chance.random() < 0.2:
        header = chance.choice((DEEP.encode(), b'{"a":' + HUGE.encode() + b"}", b"\xff" * 40, b""))
    size = chance.choice((len(header), len(header), len(header), 2**63 - 1, 0, 10**8)).to_bytes(8, "little")
    path.write_bytes(size + header + data[8 + length :])
    facts = folder / path.name.replace(".safetensors", ".json")
    said = json.loads(facts.read_bytes())
    said["sums"]["header"] = digest_of(size + header)
    facts.write_bytes(json.dumps(said).encode())
    _refresh(folder, path.name, facts.name)


def _mutate(chance: random.Random, plain: Any) -> None:
    """Change one value, somewhere in a tree."""
    places: list[tuple[Any, Any]] = []

    def visit(value: Any) -> None:
        keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in keys:
            places.append((value, key))
            visit(value[key])

    visit(plain)
    if not places:
        return
    # Each level as often as any other: else most places are within lists of numbers.
    holder, key = chance.choice(places) if chance.random() < 0.6 else chance.choice(places[:40])
    kind = chance.randrange(5)
    if kind == 0 and isinstance(holder, dict):
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[str(chance.choice(VALUES))] = holder.pop(key)
    elif kind == 2:
        other, place = chance.choice(places)
        holder[key] = copy.deepcopy(other[place])
    elif kind == 3 and isinstance(holder[key], int):
        holder[key] += chance.choice((-1, 1, 2**40))
    else:
        holder[key] = copy.deepcopy(chance.choice(VALUES))


def _refresh(folder: Path, *names: str) -> None:
    """Have the manifest say what files are now."""
    plain = json.loads((folder / MANIFEST).read_bytes())["manifest"]
    for name in names:
        record, data = plain["files"][name], (folder / name).read_bytes()
        record["num_bytes"] = len(data)
        if record["checksum"] is not None:
            record["checksum"] = digest_of(data)
    _write_manifest(folder, plain)


def _write_manifest(folder: Path, plain: Any) -> None:
    text = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    outer = {"checksum": digest_of(text), "manifest": plain}
    (folder / MANIFEST).write_bytes(json.dumps(outer, indent=1).encode() + b"\n")


def _files(folder: Path) -> list[Path]:
    names = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    return [path for path in names if path.is_file()]


def _some_file(chance: random.Random, folder: Path) -> Path:
    return chance.choice(_files(folder))


Damage = Callable[[random.Random, Path], None]
DAMAGES: dict[str, tuple[Damage, bool]] = {  # and whether checksums were made to fit
    "a bit changed": (flip, False),
    "cut off": (cut, False),
    "extended": (extend, False),
    "bytes put in or taken out": (insert, False),
    "files exchanged": (exchange, False),
    "a file removed or replaced": (remove, False),
    "hostile manifest, checksum fits": (hostile_manifest, True),
    "hostile JSON, checksums fit": (hostile_json, True),
    "hostile header of tensors, checksums fit": (hostile_header, True),
}


FORBIDDEN = ("os.system", "subprocess.Popen", "os.exec", "os.fork", "pickle.find_class", "os.remove", "os.rename")


class Watch:
    """Notes what this process opens, runs or removes, by Python's audit events. It cannot be taken off again."""

    def __init__(self) -> None:
        self.folder = ""  # that may be read; empty: nothing is noted
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.folder:
            return
        if event == "open":
            path, _, flags = arguments
            is_read = isinstance(flags, int) and not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if not is_read or (
                isinstance(path, str) and not path.startswith(self.folder) and "/lib/python" not in path
            ):
                self.seen.append(f"open {path!r}")
        elif event in (
            "os.system",
            "subprocess.Popen",
            "os.exec",
            "os.fork",
            "pickle.find_class",
            "os.remove",
            "os.rename",
        ):
            self.seen.append(event)


def one(watch: Watch, good: Path, expected: dict[str, Any], place: Path, name: str, seed: str) -> tuple[bool, str]:
    """Damage a copy and read it. Returns whether it was refused, and what went wrong."""
    damage, fits = DAMAGES[name]
    folder = place / TAG
    shutil.copytree(good, folder)
    try:
        damage(random.Random(seed), folder)
        watch.folder, watch.seen = str(place), []
        start_s = time.perf_counter()
        problem, is_refused = "", False
        try:
            found = everything(folder)
            if not fits and found != expected:
                problem = "it was read as something else"
        except CheckpointError as error:
            is_refused = True
            if str(place) not in str(error):
                problem = f"the error names no file: {error}"
        except Exception:  # noqa: BLE001  # finding these is the purpose
            problem = traceback.format_exc()
        finally:
            watch.folder = ""
        if time.perf_counter() - start_s > 5.0:
            problem = problem or f"it took {time.perf_counter() - start_s:.0f} s"
        return is_refused, problem or (f"it did {watch.seen[:3]}" if watch.seen else "")
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Damage, read, and write what happened."""
    parser = argument_parser(__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    page = Section("Damaged and hostile checkpoints", "torch")
    watch, rows, problems, share = Watch(), [], [], max(1, options.count // len(DAMAGES))
    with tempfile.TemporaryDirectory() as text:
        place = Path(text, "damaged")
        place.mkdir()
        good = save_one(Path(text, "good"))
        expected = everything(good)
        before = sorted(Path(text).rglob("*"))
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for name in DAMAGES:
            num_refused, start_s, found = 0, time.perf_counter(), []
            for number in range(share):
                is_refused, problem = one(watch, good, expected, place, name, f"{options.seed} {name} {number}")
                num_refused += is_refused
                if problem:
                    found.append(f"{name} {number}: {problem}")
            seconds = time.perf_counter() - start_s
            rows.append([name, f"{share:,}", f"{num_refused:,}", f"{seconds:.1f} s", str(len(found) or "none")])
            problems += found
        growth_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib)
        if growth_bytes > GROWTH_BYTES:
            problems.append(f"memory grew by {growth_bytes / 2**20:.0f} MiB")
        if sorted(Path(text).rglob("*")) != before:
            problems.append("something was written")
    columns = ["damage", "checkpoints", "refused by name", "time", "failures"]
    result = (
        "What was not refused was read bit by bit as it had been saved (a byte that no reader needs), or had been given"
        " checksums that fit.\nA failure is any other exception, an error that names no file, another value, a file"
        f" opened outside of the folder or written, and more than 5 s.\nPeak memory grew by"
        f" {growth_bytes / 2**20:.0f} MiB; seed {options.seed}.\n\n{table(columns, rows)}"
    )
    page.write(f"{share * len(DAMAGES):,} checkpoints, each read once", result, options.output)
    sys.stderr.write("\n".join(problems[:30]))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
