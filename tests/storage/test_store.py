"""What is written comes back; nothing stays behind; an error names its place."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import disks
from harness.launch.command import DEADLINE_S, ROOT
from harness.needs import need

from launcher.base.errors import EngineError
from launcher.storage import store as module
from launcher.storage.store import ALIGNMENT_BYTES, AioSettings, Extent, Store, aligned_buffer

BLOCK = 16 * ALIGNMENT_BYTES
SETTINGS = AioSettings(block_size_bytes=BLOCK, queue_depth=4, num_threads=1)
SIZES = (0, 1, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 123)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(str(tmp_path), SETTINGS)
    yield made
    made.close()


def noise(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def put(store: Store, data: bytes) -> Extent:
    extent = store.reserve(len(data))
    store.write(extent, memoryview(data)).wait()
    return extent


def get(store: Store, extent: Extent) -> bytes:
    memory = aligned_buffer(extent.num_bytes)
    store.read(extent, memory).wait()
    return bytes(memory)


@pytest.mark.parametrize("num_bytes", SIZES)
@pytest.mark.parametrize("shift", [0, 1, 64])
def test_any_size_at_any_address_comes_back(store: Store, num_bytes: int, shift: int) -> None:
    memory = aligned_buffer(num_bytes + shift)[shift:]
    memory[:] = data = noise(num_bytes)
    extent, neighbour = store.reserve(num_bytes), store.reserve(BLOCK)
    store.write(neighbour, memoryview(noise(BLOCK, seed=1))).wait()
    store.write(extent, memory).wait()
    memory[:] = bytes(num_bytes)
    store.read(extent, memory).wait()
    assert memory == data
    assert get(store, neighbour) == noise(BLOCK, seed=1)


def test_transfers_may_overlap(store: Store) -> None:
    extents = [store.reserve(3 * BLOCK + number) for number in range(20)]
    memories = [aligned_buffer(extent.num_bytes) for extent in extents]
    for number, memory in enumerate(memories):
        memory[:] = noise(len(memory), seed=number)
    writes = [store.write(extent, memory) for extent, memory in zip(extents, memories, strict=True)]
    for write in writes:
        write.wait()
    back = [aligned_buffer(extent.num_bytes) for extent in extents]
    reads = [store.read(extent, memory) for extent, memory in zip(extents, back, strict=True)]
    writes = [store.write(store.reserve(BLOCK), aligned_buffer(BLOCK)) for _ in extents]
    for transfer in (*reads, *writes):
        transfer.wait()
        assert transfer.is_done
    assert back == memories


def test_a_write_that_waits_for_its_values_keeps_back_no_read(store: Store) -> None:
    kept, extent, arrived = put(store, noise(BLOCK)), store.reserve(3 * BLOCK), threading.Event()
    memory = aligned_buffer(3 * BLOCK)
    transfer = store.write(extent, memory, lambda: bool(arrived.wait(DEADLINE_S)) and None)
    assert get(store, kept) == noise(BLOCK)
    assert not transfer.is_done
    memory[:] = noise(3 * BLOCK, seed=1)
    arrived.set()
    transfer.wait()
    assert get(store, extent) == noise(3 * BLOCK, seed=1)


@pytest.mark.parametrize("block_size_bytes", [1, 5000, 1 << 20])
def test_a_block_size_is_rounded_to_what_a_disk_takes(tmp_path: Path, block_size_bytes: int) -> None:
    store = Store(str(tmp_path), AioSettings(block_size_bytes, queue_depth=2, num_threads=3))
    assert store.settings.request_bytes % ALIGNMENT_BYTES == 0
    assert store.settings.num_requests == 6
    assert get(store, put(store, noise(50_001))) == noise(50_001)
    store.close()


def test_requests_are_in_flight_at_the_same_time_as_the_settings_say(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = threading.Barrier(SETTINGS.num_requests, timeout=DEADLINE_S)

    def meet(_descriptor: int, views: list[memoryview], _offset: int) -> int:
        meeting.wait()  # broken unless all of them are here together
        return len(views[0])

    extent = store.reserve(2 * SETTINGS.num_requests * BLOCK)
    monkeypatch.setattr(os, "preadv", meet)
    store.read(extent, aligned_buffer(extent.num_bytes)).wait()


def test_nothing_can_be_seen_in_the_folder_and_two_stores_do_not_meet(tmp_path: Path) -> None:
    stores = [Store(str(tmp_path), SETTINGS) for _ in range(2)]
    extents = [put(store, noise(2 * BLOCK, seed)) for seed, store in enumerate(stores)]
    assert list(tmp_path.iterdir()) == []
    assert [extent.offset for extent in extents] == [0, 0]
    assert [get(store, extent) for store, extent in zip(stores, extents, strict=True)] == [
        noise(2 * BLOCK, seed) for seed in range(2)
    ]
    for store in stores:
        store.close()


def open_files_in(folder: Path) -> list[str]:
    targets = (os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())
    return [target for target in targets if target.startswith(str(folder))]


def test_close_gives_the_space_back(tmp_path: Path) -> None:
    store = Store(str(tmp_path), SETTINGS)
    put(store, noise(BLOCK))
    assert len(open_files_in(tmp_path)) == 1
    store.close()
    assert open_files_in(tmp_path) == []


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    code = f"""
from launcher.storage.store import AioSettings, Store
store = Store({str(tmp_path)!r}, AioSettings({BLOCK}, 4, 1))
extent = store.reserve({64 * BLOCK})
print("ready", flush=True)
while True:
    store.write(extent, memoryview(bytes({64 * BLOCK}))).wait()
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_transfers_under_way_at_the_end_of_the_interpreter_end_well(tmp_path: Path) -> None:
    code = f"""
from launcher.storage.store import AioSettings, Store
store = Store({str(tmp_path)!r}, AioSettings({BLOCK}, 4, 1))
store.write(store.reserve({256 * BLOCK}), memoryview(bytes({256 * BLOCK})))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_without_o_direct_the_page_cache_serves_and_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = fcntl.fcntl

    def refuse(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return known(descriptor, command, flags)

    monkeypatch.setattr(module.fcntl, "fcntl", refuse)
    store = Store(str(tmp_path), SETTINGS)
    assert store.notice is not None
    assert store.notice.startswith(f"{tmp_path}: no O_DIRECT")
    for num_bytes in SIZES:
        assert get(store, put(store, noise(num_bytes))) == noise(num_bytes)
    store.close()


def test_a_file_system_that_refuses_the_first_direct_write_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        store = Store(str(tmp_path), SETTINGS)
    assert store.notice is not None
    assert get(store, put(store, noise(BLOCK + 1))) == noise(BLOCK + 1)
    store.close()


def test_direct_transfers_are_used_where_the_disk_has_them(store: Store, tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        need("the temporary folder has no O_DIRECT")
    assert store.notice is None
    flags = fcntl.fcntl(store._file._descriptor, fcntl.F_GETFL)
    assert flags & os.O_DIRECT


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"nowhere: a swap file cannot be created: No such file .*; create it"):
        Store(str(tmp_path / "nowhere"), SETTINGS)


def test_more_than_the_disk_has_is_refused_before_anything_is_written(store: Store, tmp_path: Path) -> None:
    with pytest.raises(EngineError) as caught:
        store.reserve(1 << 60)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}: 1048576.0 TiB cannot be reserved: No space left on device")
    assert "are free there; make room" in text
    assert store.size_bytes == 0
    assert get(store, put(store, b"continues")) == b"continues"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with disks.small_disk(tmp_path / "small", "1m") as folder:
        yield folder


def test_a_full_disk_is_found_when_room_is_reserved(small_disk: Path) -> None:
    store = Store(str(small_disk), SETTINGS)
    store.reserve(512 << 10)
    with pytest.raises(EngineError, match=r"small: 768.0 KiB cannot be reserved: No space left"):
        store.reserve(768 << 10)
    store.close()
    assert os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize == 1 << 20


@pytest.fixture
def small_files() -> Iterator[int]:
    """A limit on the size of files, so that a write beyond it really fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * BLOCK, before[1]))
    yield 4 * BLOCK
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_fails_is_raised_by_wait_and_by_every_call_after_it(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store = Store(str(tmp_path), SETTINGS)
    low, high = store.reserve(2 * BLOCK), store.reserve(8 * BLOCK)
    request.getfixturevalue("small_files")
    store.write(low, aligned_buffer(2 * BLOCK)).wait()
    transfer = store.write(high, aligned_buffer(8 * BLOCK))
    with pytest.raises(EngineError) as caught:
        transfer.wait()
    assert str(caught.value).startswith(f"{tmp_path}: 512.0 KiB could not be written: File too large; ")
    assert "are free there; the limit of file sizes is too low" in str(caught.value)
    for call in (lambda: store.write(low, aligned_buffer(2 * BLOCK)), lambda: store.reserve(1)):
        with pytest.raises(EngineError, match="could not be written"):
            call()
    store.close()


def test_a_read_that_fails_names_the_folder(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    extent = put(store, noise(BLOCK))
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(EngineError, match=rf"{tmp_path}: 64.0 KiB could not be read: Input/output error; .*dmesg"):
        get(store, extent)


def test_a_file_that_is_too_short_is_an_error_and_no_endless_loop(store: Store) -> None:
    extent = put(store, noise(4 * BLOCK))
    os.ftruncate(store._file._descriptor, BLOCK)
    with pytest.raises(EngineError, match=r"the file ends 64\.0 KiB too early"):
        get(store, extent)


def test_a_request_that_is_cut_short_is_continued(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    known = os.pwritev

    def cut(descriptor: int, views: list[memoryview], offset: int) -> int:
        return known(descriptor, [views[0][:ALIGNMENT_BYTES]], offset)

    monkeypatch.setattr(os, "pwritev", cut)
    assert get(store, put(store, noise(3 * BLOCK))) == noise(3 * BLOCK)


def test_memory_of_another_size_is_refused(store: Store) -> None:
    extent = store.reserve(BLOCK)
    with pytest.raises(ValueError, match=f"{BLOCK - 1} bytes of memory for an extent of {BLOCK} bytes"):
        store.write(extent, aligned_buffer(BLOCK - 1))


def test_a_forked_child_is_refused(store: Store) -> None:
    extent = put(store, noise(BLOCK))
    child = os.fork()
    if child == 0:
        try:
            store.read(extent, memoryview(bytearray(BLOCK)))
        except EngineError as error:
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_aligned_memory_is_zeroed_at_a_page_and_private() -> None:
    memory = aligned_buffer(10_001)
    assert bytes(memory) == bytes(10_001)
    base = memory.obj
    assert isinstance(base, mmap.mmap)
    assert len(base) == 3 * ALIGNMENT_BYTES


def test_large_memory_begins_at_a_huge_page_whatever_its_length() -> None:
    """One that is not whole there is made of small pages."""
    held = [aligned_buffer((5 << 20) + number * ALIGNMENT_BYTES) for number in range(1, 8)]
    assert {ctypes.addressof(ctypes.c_char.from_buffer(each)) % (2 << 20) for each in held} == {0}


def test_aligned_memory_is_not_for_forked_children_and_asks_for_huge_pages() -> None:
    memory = aligned_buffer(4 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    maps = Path("/proc/self/smaps").read_text()
    ranges = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: (.*?)$", maps, re.MULTILINE | re.DOTALL)
    (flags,) = (found.split() for start, end, found in ranges if int(start, 16) <= address < int(end, 16))
    assert "dc" in flags
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()
