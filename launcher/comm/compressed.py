"""The mean of a flat buffer over the ranks at one bit an element, with error feedback.

Two phases, as in 1-bit Adam (Tang et al., https://arxiv.org/abs/2102.02888, section 4): each rank sends the signs of
its chunks to their owners (all-to-all); an owner averages what it got and sends the signs of the mean to every rank
(all-gather). What a sign leaves out stays with the rank that took it, the worker and the server error, and is added
before the next signs are taken.

A sign stands for the root mean square of its block of 1,024 elements, so that signs have the norm of what they stand
for. (The mean magnitude, which leaves out less at once, is worse in the long run: of 4,096 normal elements, the same in
each of 1,024 calls, it leaves an error of 32 times their norm that keeps growing; the root mean square one of 4 that
does not.) One scale for a whole tensor, as papers have it, would drown small parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from launcher.comm.groups import RankGroup

BLOCK_NUMEL = 1024
_SIGN_BYTES = BLOCK_NUMEL // 8
_BLOCK_BYTES = _SIGN_BYTES + torch.float32.itemsize  # on the wire: signs and the scale
# Blocks worked on together, by kind of device: temporaries stay in a CPU's cache. 8 M elements on one thread took 33 ms
# to compress as a whole, 11 ms in these.
_PIECE_BLOCKS = {"cpu": 2**8}
_DEFAULT_PIECE_BLOCKS = 2**14


def pack_signs(values: Tensor) -> Tensor:
    """Return the sign bits of `values`, eight a byte, lowest bit first; a set bit is a negative element.

    values: fp32, contiguous, the last dimension a multiple of 8. Returns uint8, the last dimension an eighth.
    """
    word = (values.view(torch.int32) < 0).view(torch.int64)  # eight elements: one byte each, 0 or 1
    for shift in (7, 14, 28):  # bring neighbours together: 2, then 4, then 8 of them stand in the lowest byte
        word = word | (word >> shift)
    return word.to(torch.uint8)


def unpack_signs(packed: Tensor, table: Tensor) -> Tensor:
    """Return +1 or -1 (fp32) for each bit of `packed` (uint8 [rows, bytes]). table: `sign_table()` on its device."""
    return table.index_select(0, packed.reshape(-1).int()).view(len(packed), -1)


def sign_table(device: torch.device) -> Tensor:
    """Return the eight signs of every byte, fp32 [256, 8]."""
    bits = (torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device)) & 1
    return 1.0 - 2.0 * bits.float()


class CompressedMean:
    """Averages one flat fp32 buffer over the ranks, again and again; holds the errors of this rank.

    The buffer has a run for each of `numels`, at `places`; runs begin at blocks, so that none shares a scale. What
    stands between runs must be zero, and stays so. Alone there is nobody to send to: the buffer is its own mean.
    """

    def __init__(self, group: RankGroup, numels: Sequence[int]) -> None:
        """numels: elements of each run; the same on every rank."""
        self._group = group
        ends = list(accumulate(-(-numel // BLOCK_NUMEL) * BLOCK_NUMEL for numel in numels))
        self.places = [slice(start, start + n) for start, n in zip([0, *ends], numels, strict=False)]
        step = BLOCK_NUMEL * group.world_size
        self.numel = -(-(ends[-1] if ends else 0) // step) * step  # of the buffer: equal chunks of whole blocks
        num_errors = self.numel if group.process_group is not None else 0
        self.worker_error = torch.zeros(num_errors, device=group.device)
        self.server_error = torch.zeros(num_errors // group.world_size, device=group.device)
        chunk = len(self.server_error)
        self._own = slice(group.rank * chunk, (group.rank + 1) * chunk)  # what this rank is the server of
        is_padding = torch.ones(num_errors, dtype=torch.bool, device=group.device)
        for place in self.places:
            is_padding[place] = False
        self._padding = is_padding.nonzero().view(-1)  # a few hundred indices a run
        self._own_padding = is_padding[self._own].nonzero().view(-1)
        self._block_roots = (~is_padding).view(-1, BLOCK_NUMEL).sum(1, keepdim=True).clamp(min=1).float().sqrt()
        self._table = sign_table(group.device)

    def average(self, flat: Tensor, inactive: Sequence[int] = ()) -> None:
        """Replace `flat` (1-D fp32, `numel`) by its compressed mean over the ranks: the same bits on each of them.

        inactive: indices of places that take no part, the same on every rank; their values and errors stay. Every rank
        must call it, in the same order among all collectives. Blocks until the mean is there.
        """
        if self._group.process_group is None:
            return
        kept = [(part, part.clone()) for index in inactive for part in self._parts(flat, self.places[index])]
        rank, world_size, buffers = self._group.rank, self._group.world_size, self._group.buffers
        wire, received = (buffers.borrow(self.numel // BLOCK_NUMEL * _BLOCK_BYTES, torch.uint8) for _ in range(2))
        chunks, roots = flat.chunk(world_size), self._block_roots.chunk(world_size)
        wires = wire.chunk(world_size)
        for chunk, error, root, signs in zip(chunks, self.worker_error.chunk(world_size), roots, wires, strict=True):
            _compress(chunk, error, root, signs)
        self.worker_error.index_fill_(0, self._padding, 0.0)
        self._group.communicator.all_to_all(wire, received).wait()
        mean = chunks[rank].zero_()  # its own signs are on the wire already
        for signs in received.chunk(world_size):
            self._add_decoded(signs, mean)
        mean.div_(world_size).index_fill_(0, self._own_padding, 0.0)
        _compress(mean, self.server_error, roots[rank], wires[rank])
        self.server_error.index_fill_(0, self._own_padding, 0.0)
        self._group.communicator.all_gather(wire).wait()
        for chunk, signs in zip(chunks, wires, strict=True):
            self._add_decoded(signs, chunk.zero_())
        flat.index_fill_(0, self._padding, 0.0)
        for part, value in kept:
            part.copy_(value)
        buffers.give_back(wire)
        buffers.give_back(received)

    def _add_decoded(self, wire: Tensor, target: Tensor) -> None:
        for signs, scales, values in _in_pieces(*_split(wire), _blocks(target)):
            values.addcmul_(unpack_signs(signs, self._table), scales)

    def _parts(self, flat: Tensor, place: slice) -> list[Tensor]:
        """Return what a run has here: its values and worker error, and what of its server error is this rank's."""
        start, stop = max(place.start, self._own.start), min(place.stop, self._own.stop)
        served = slice(start - self._own.start, max(start, stop) - self._own.start)
        return [flat[place], self.worker_error[place], self.server_error[served]]


def _blocks(flat: Tensor) -> Tensor:
    return flat.view(-1, BLOCK_NUMEL)


def _split(wire: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parts of a chunk on the wire: packed signs, uint8 [blocks, bytes], then scales, fp32 [blocks, 1]."""
    num_sign_bytes = wire.numel() // _BLOCK_BYTES * _SIGN_BYTES
    return wire[:num_sign_bytes].view(-1, _SIGN_BYTES), wire[num_sign_bytes:].view(torch.float32).unsqueeze(1)


def _in_pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors of as many rows, one a block, into pieces."""
    num_blocks = _PIECE_BLOCKS.get(tensors[0].device.type, _DEFAULT_PIECE_BLOCKS)
    return zip(*(tensor.split(num_blocks) for tensor in tensors), strict=True)


def _compress(values: Tensor, error: Tensor, roots: Tensor, wire: Tensor) -> None:
    """Write signs and scales of `values` + `error` to `wire`, and into `error` what they leave out.

    roots: of the number of elements of each block, padding left out, [blocks, 1].
    """
    for signs, scales, blocks, given, root in _in_pieces(*_split(wire), _blocks(error), _blocks(values), roots):
        blocks.add_(given)
        torch.div(torch.linalg.vector_norm(blocks, dim=1, keepdim=True), root, out=scales)
        signs.copy_(pack_signs(blocks))
        blocks.sub_(torch.copysign(scales, blocks))
