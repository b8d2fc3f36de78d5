"""A model whose replicated parameters drift apart would train on, silently: their first gradients are compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from launcher.base.errors import EngineError
from launcher.comm import collectives
from launcher.comm.groups import RankGroup

_NUM_PARTS = 8
# Of a gradient's norm. Rounding differs by far less; what lacks the other ranks' part differs by far more.
_TOLERANCE = 1e-2


def check_replicated_gradients(names: Sequence[str], gradients: Sequence[Tensor], group: RankGroup) -> None:
    """Raise EngineError where gradients of whole parameters differ between the ranks of one layer beyond rounding.

    names, gradients: of parameters that are not split, alike on every rank of the group; the gradients are those of the
    same samples, before any reduction over data-parallel ranks. Every rank of the group must call it, and all raise.
    """
    if group.world_size == 1 or not names:
        return
    digests = torch.stack([_digest(gradient) for gradient in gradients]).to(group.device)  # [names, 1 + parts]
    rows = collectives.gather_rows(group, digests)
    spread = (rows.amax(0) - rows.amin(0)).amax(-1)
    # A digest that is not finite differs from nothing: what comes of it is the business of the loss scaler.
    differs = (spread > _TOLERANCE * rows[..., 0].amax(0)).tolist()
    wrong = [name for name, is_wrong in zip(names, differs, strict=True) if is_wrong]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise EngineError(
            f"the gradient of {', '.join(wrong[:3])}{more} differs between the ranks of one layer: it is used between a"
            " column- and a row-split layer",
            where="tensor_parallel",
            hint='give it partition_type "skip" and grad_allreduce: true in tensor_parallel.partition_config, or the'
            " style replicated_summed_grad in a plan",
        )


def _digest(gradient: Tensor) -> Tensor:
    """Return the norm of a gradient, and the sums of its parts, in float64."""
    flat = gradient.detach().reshape(-1)
    sums = [part.sum(dtype=torch.float64) for part in flat.tensor_split(_NUM_PARTS)]
    return torch.stack([torch.linalg.vector_norm(flat, dtype=torch.float64), *sums])
