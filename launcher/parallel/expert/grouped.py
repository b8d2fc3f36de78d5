"""The experts of a rank at once: each of their linear layers is one product for all experts.

One after another, many small experts keep a GPU waiting for launches. Where it is the same function, and torch has a
kernel for it, one grouped product (`torch.nn.functional.grouped_mm`) takes the place of a product for each expert.
Each rank may choose for itself: nothing here communicates.

[Note: when it is the same function] Experts are sequences of linear layers and elementwise activations, all alike, and
nothing else runs when one of their modules is called. The engine's own hooks wait for parameters in flight; to read
these does the same. Experts whose parameters are sharded run one after another: so each rank gathers one at a time, in
an order that does not depend on what its device can do.

[Note: what the kernel needs] bf16, and 16 bytes: matrices, their rows and the matrices of a stack begin at multiples of
them. Rows of experts may be any number, none too. But for a gradient of weights, which is a sum over rows, the kernel
writes nothing defined where there is no row (https://github.com/pytorch/pytorch/issues/172439), so it is set to zero
here. On other devices than sm_90 and sm_100 torch has a loop in its place, which reads the offsets on the host. torch
before 2.10 has no such public function, and its kernel hung where an expert had no row
(https://github.com/pytorch/pytorch/pull/155466).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from launcher.comm.torch_internals import is_in_transform
from launcher.kernels.triton_kernels import to_device
from launcher.zero.hooks import is_read_as_called

_ALIGNMENT_BYTES = 16
_ALIGNMENT_NUMEL = 8  # in bf16
_MAX_EXPERTS = 1023  # of one launch
# Those that torch has an image of the kernel for: on others it may have code that cannot run.
_CAPABILITIES = ((9, 0), (10, 0))
_ELEMENTWISE = {
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign),
    *(nn.Tanh, nn.Tanhshrink, nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink),
    *(nn.Softshrink, nn.Dropout, nn.Identity),
}


def run_grouped(experts: Sequence[nn.Module], rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Run all experts at once, each on its rows. rows: [n, width], those of the first expert first -> the same.

    sizes: how many rows each expert has; of one without a row parameters get gradients of zero. The experts must be
    those of `are_groupable`. Dropout draws other numbers than one expert after another would.
    """
    places = _places(sizes, rows.device)
    layers: tuple[Any, ...]
    for layers in zip(*(expert._modules.values() for expert in experts), strict=True):
        if type(layers[0]) is nn.Linear:
            params = [layer.weight for layer in layers]
            if layers[0].bias is not None:
                params += [layer.bias for layer in layers]
            rows = GroupedLinear.apply(rows.to(torch.bfloat16), places, *params)
        else:
            rows = layers[0](rows)
    return rows


# ---- where that is the same function ----


@functools.cache
def has_grouped_kernel(device: torch.device) -> bool:
    """Whether torch has a kernel on a device for grouped products in bf16, of which the host reads no size."""
    if device.type != "cuda" or torch.version.hip is not None or not hasattr(F, "grouped_mm"):
        return False
    return torch.cuda.get_device_capability(device) in _CAPABILITIES


def are_groupable(experts: Sequence[nn.Module], rows: Tensor) -> bool:
    """Whether `run_grouped` gives what `run_each` gives, and rows are where, and of the type, that it needs."""
    device = rows.device
    if not has_grouped_kernel(device) or not 0 < len(experts) <= _MAX_EXPERTS or is_in_transform():
        return False
    casts = torch.is_autocast_enabled(device.type)
    types = {torch.bfloat16, torch.float16, torch.float32} if casts else {torch.bfloat16}  # what autocast casts
    if rows.dtype not in types or (casts and torch.get_autocast_dtype(device.type) is not torch.bfloat16):
        return False
    first = _description(experts[0], device, types)
    return (
        first is not None
        and any(part[0] is nn.Linear for part in first)
        and all(_description(expert, device, types) == first for expert in experts[1:])
    )


def _description(expert: nn.Module, device: torch.device, types: Set[torch.dtype]) -> list[tuple[Any, ...]] | None:
    """Return what is equal for experts that compute the same function of their parameters; None: they do not group."""
    if type(expert) is not nn.Sequential or not _is_plain(expert):
        return None
    found: list[tuple[Any, ...]] = []
    for module in expert._modules.values():
        if module is None or not _is_plain(module):
            return None
        if type(module) is nn.Linear:
            # Not by the attributes: to read a parameter waits for it.
            weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
            if not _are_fit(weight, bias, device, types):
                return None
            found.append((nn.Linear, *((param.shape, param.dtype) for param in (weight, bias) if param is not None)))
        elif type(module) in _ELEMENTWISE:
            found.append((type(module), module.extra_repr(), module.training))
        else:
            return None
    return found


def _is_plain(module: nn.Module) -> bool:
    """Whether a call of a module does what its class says, and nothing that a read of its parameters leaves out."""
    return "forward" not in vars(module) and module._compiled_call_impl is None and is_read_as_called(module)


def _are_fit(weight: Tensor | None, bias: Tensor | None, device: torch.device, types: Set[torch.dtype]) -> bool:
    if weight is None or weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        return False
    return all(width and width % _ALIGNMENT_NUMEL == 0 for width in weight.shape) and all(
        type(param) in (nn.Parameter, Tensor)
        and param.device == device
        and param.dtype in types
        and param.is_contiguous()
        for param in ([weight] if bias is None else [weight, bias])
    )


# ---- the product ----


@dataclass(frozen=True)
class _Places:
    """Where the rows of each expert are, on the device."""

    ends: Tensor  # int32 [experts]
    empty: Tensor | None  # int64, the experts without a row; None: there is none
    num_rows: int

    @functools.cached_property
    def expert(self) -> Tensor:
        """The expert of each row, int64 [rows]."""
        rows = torch.arange(self.num_rows, dtype=torch.int32, device=self.ends.device)
        return torch.bucketize(rows, self.ends, right=True)


def _places(sizes: Sequence[int], device: torch.device) -> _Places:
    """Queue the copy of `sizes` to the device, and do not wait for it: torch keeps pinned memory until it is done."""
    empty = [index for index, size in enumerate(sizes) if not size]
    table = torch.tensor([*accumulate(sizes), *empty], dtype=torch.int32)
    table = to_device(table, device)
    return _Places(table[: len(sizes)], table[len(sizes) :].long() if empty else None, sum(sizes))


class GroupedLinear(torch.autograd.Function):
    """A linear layer of each expert on its rows: what `F.linear` gives, with one rounding more where it has a bias."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: _Places, *params: Tensor) -> Tensor:
        """rows: bf16 [n, inputs] -> bf16 [n, outputs].

        params: the weights of all experts [outputs, inputs], then their biases [outputs] where they have some.
        """
        count = len(places.ends)
        weights, biases = params[:count], params[count:]
        ctx.places, ctx.types = places, [each[0].dtype for each in (weights, biases) if each]
        rows = _aligned(rows)
        trains_weights, trains_rows = any(ctx.needs_input_grad[2 : 2 + count]), ctx.needs_input_grad[0]
        # Parameters, and no stack of them: where that is a copy it is made again in backward.
        ctx.save_for_backward(rows if trains_weights else None, *(weights if trains_rows else ()))
        output = _by_rows(rows, stacked(weights).to(rows.dtype).transpose(1, 2), places)
        if biases:
            output += stacked(biases).to(rows.dtype)[places.expert]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """An expert without a row gets gradients of zero, as from its own layer."""
        places: _Places = ctx.places
        count = len(places.ends)
        rows, *weights = ctx.saved_tensors
        grad = _aligned(grad)
        of_rows = _by_rows(grad, stacked(weights).to(grad.dtype), places) if weights else None
        of_params: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 2)
        if rows is not None:
            of_params[:count] = _by_expert(grad, rows, places).to(ctx.types[0]).unbind()
        if any(ctx.needs_input_grad[2 + count :]):
            # The product with ones: a sum over rows in fp32, in an order that is always the same.
            sums = _by_expert(grad, grad.new_ones(len(grad), _ALIGNMENT_NUMEL), places)[..., 0]
            of_params[count:] = sums.to(ctx.types[1]).contiguous().unbind()
        return of_rows, None, *of_params


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return contiguous tensors of one shape as one, [len(tensors), ...]; of what lies at equal distances, a view.

    So the engine has the parameters of equal experts in the flat buffer of a unit.
    """
    first = tensors[0].detach()
    if len(tensors) == 1:
        return _at_multiple(first[None])
    offsets = [tensor.storage_offset() for tensor in tensors]
    distance = offsets[1] - offsets[0]
    is_even = distance >= first.numel() and offsets == [offsets[0] + index * distance for index in range(len(tensors))]
    address = first.untyped_storage().data_ptr()
    is_one = is_even and all(tensor.untyped_storage().data_ptr() == address for tensor in tensors)
    if not is_one or distance * first.element_size() % _ALIGNMENT_BYTES:
        return torch.stack([tensor.detach() for tensor in tensors])
    return _at_multiple(first.as_strided((len(tensors), *first.shape), (distance, *first.stride())))


def _at_multiple(tensor: Tensor) -> Tensor:
    """Return a tensor that begins at a multiple of 16 bytes: a copy where it does not."""
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.data_ptr() % _ALIGNMENT_BYTES else tensor


def _aligned(rows: Tensor) -> Tensor:
    """Return rows [n, width] one behind the other, which begin at a multiple of 16 bytes."""
    is_dense = rows.stride() == (rows.shape[1], 1)  # `contiguous` leaves any stride where n is 1
    return _at_multiple(rows if is_dense else rows.clone(memory_format=torch.contiguous_format))


def _by_rows(rows: Tensor, weights: Tensor, places: _Places) -> Tensor:
    """Return the product of each row with the matrix of its expert. [n, a], [experts, a, b] -> [n, b]."""
    if not len(rows):
        return rows.new_empty(0, weights.shape[2])
    return F.grouped_mm(rows, weights, offs=places.ends)


def _by_expert(left: Tensor, right: Tensor, places: _Places) -> Tensor:
    """Return for each expert the sum of the outer products of its rows. [n, a], [n, b] -> [experts, a, b]."""
    if not len(left):
        return left.new_zeros(len(places.ends), left.shape[1], right.shape[1])
    products = F.grouped_mm(left.t(), right, offs=places.ends)
    return products if places.empty is None else products.index_fill_(0, places.empty, 0)
