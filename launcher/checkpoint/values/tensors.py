"""Tensors as bytes, and their types by the names of files."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

TORCH_DTYPES = {
    "F64": torch.float64, "I64": torch.int64, "C64": torch.complex64, "F32": torch.float32, "I32": torch.int32,
    "F16": torch.float16, "BF16": torch.bfloat16, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip
FILE_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type as torch prints it, without "torch."."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor, copied to the host where it is not there or not contiguous."""
    tensor = tensor.detach().cpu().contiguous()
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # the view keeps the tensor alive
    return memoryview(memory).cast("B")
