"""The memory under storages that are swapped to disk: registered with CUDA once, and the end of the disk itself."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch
from harness.launch.command import wait_until
from harness.logs import logged
from harness.train.cudart import Cudart

from launcher.comm import buffers
from launcher.storage.store import AioSettings, Store
from launcher.zero.disk import Disk, Swapped
from launcher.zero.placement import Disks


def _swap_in_and_out(folder: Path, cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    disk = Disk(str(folder), AioSettings(4096, 2, 1), pins_memory=True)
    tensors = [torch.full((2048,), float(number)) for number in range(3)]
    swaps = [Swapped(disk, tensor) for tensor in tensors]
    for swap in swaps:
        swap.send_out(max_writes=0)
    for _ in range(3):
        for tensor, swap, value in zip(tensors, swaps, range(3), strict=True):
            swap.bring_in()
            assert tensor.unique().tolist() == [value]
            swap.drop()
    return disk


@pytest.mark.skipif(not hasattr(torch.UntypedStorage, "_swap_data_ptr_"), reason="memory stays with its storage")
def test_what_swaps_is_registered_with_cuda_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart()
    disk = _swap_in_and_out(tmp_path, cudart, monkeypatch)
    assert cudart.num_calls == 1, "one piece of memory takes turns"
    assert not [notice for notice in Disks(params=disk).notices if "2.12" in notice]
    assert list(cudart.registered.values()) == [8192]
    del disk
    gc.collect()
    assert not cudart.registered, "what is freed is unregistered"


@pytest.mark.skipif(not hasattr(torch.UntypedStorage, "_swap_data_ptr_"), reason="memory stays with its storage")
def test_memory_that_cuda_does_not_register_serves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = Cudart(error=2)
    monkeypatch.setattr(torch, "ones", cudart.ones)
    with logged() as lines:
        _swap_in_and_out(tmp_path, cudart, monkeypatch)
    assert [line for line in lines if "refused to page-lock 8.0 KiB" in line and "(error 2)" in line]
    assert cudart.num_calls == 1
    assert cudart.last_error == 0, "the next kernel, which torch asks about the last error, would raise it"


def test_a_torch_that_moves_no_memory_swaps_all_the_same_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch before 2.12 has no `_swap_data_ptr_`: the memory of a storage is what its own allocator gives."""
    monkeypatch.setattr(buffers, "_CAN_SWAP", False)
    cudart = Cudart()
    disk = _swap_in_and_out(tmp_path, cudart, monkeypatch)
    assert cudart.num_calls == 0
    (notice,) = [notice for notice in Disks(params=disk, optimizer=disk).notices if "2.12" in notice]
    assert f"torch {torch.__version__} cannot move memory" in notice
    assert notice.endswith("install torch 2.12 or a newer one")


def test_a_disk_that_is_collected_is_closed_by_a_thread_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may run where locks are held that waiting for other threads needs."""
    closers = []
    close = Store.close
    monkeypatch.setattr(Store, "close", lambda store: (close(store), closers.append(threading.get_ident())))
    disk = Disk(str(tmp_path), AioSettings(1 << 20, 1, 1))
    swapped = Swapped(disk, torch.ones(4096))
    swapped.send_out()
    del swapped, disk
    gc.collect()
    wait_until(lambda: len(closers) == 1, "the end of the disk")
    assert closers != [threading.get_ident()]
    assert not list(tmp_path.iterdir())
