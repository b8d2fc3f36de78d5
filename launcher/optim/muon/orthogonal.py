"""Newton-Schulz iterations: from a matrix to one with the same singular vectors and singular values near 1.

Jordan et al., "Muon", https://kellerjordan.github.io/posts/muon/: the odd polynomial a·x + b·x³ + c·x⁵, applied to all
singular values at once, brings those above 0.001 of the norm to between 0.7 and 1.2 in five steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# After so many steps on the Gram matrix it is made anew: rounding lets it drift from what it stands for.
_RESTART_AFTER = 2


@dataclass(frozen=True)
class Iteration:
    """How matrices are orthogonalised."""

    dtype: torch.dtype  # of the matrices given and returned
    is_gram: bool = False  # iterate on X·Xᵀ instead of X, where X is not square: fewer products with the long side
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    num_steps: int = 5
    eps: float = 1e-7  # least norm a matrix is divided by


def orthogonalized(matrix: Tensor, how: Iteration) -> Tensor:
    """Return the orthogonalised matrix, [rows, columns] in `how.dtype`; of zeros zeros. `matrix` stays as it is."""
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    wide = wide / wide.norm().clamp(min=how.eps)
    result = _by_gram(wide, how) if how.is_gram and wide.size(0) < wide.size(1) else _by_matrix(wide, how)
    return result.T if matrix.size(0) > matrix.size(1) else result


def _by_matrix(wide: Tensor, how: Iteration) -> Tensor:
    a, b, c = how.coefficients
    for _ in range(how.num_steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide


def _by_gram(wide: Tensor, how: Iteration) -> Tensor:
    """Iterate on the Gram matrix: https://dao-lab.ai/blog/2026/gram-newton-schulz.

    A step multiplies X by P = a·I + Z, Z = b·R + c·R² of R = X·Xᵀ, which turns R into P·R·P: all steps up to the
    restart are one product with X. On 16 bits it runs in fp16, which after normalisation loses less than bf16.
    """
    a, b, c = how.coefficients
    x = wide if how.dtype == torch.float32 else wide.half()
    for num_steps in (_RESTART_AFTER, how.num_steps - _RESTART_AFTER):
        gram = x @ x.T
        product: Tensor | None = None
        for step in range(num_steps):
            z = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            if step + 1 < num_steps:
                half = torch.addmm(gram, z, gram, beta=a)
                gram = torch.addmm(half, z, half, beta=a)
            if product is None:
                product = z
                product.diagonal().add_(a)
            else:
                product = torch.addmm(product, z, product, beta=a)
        x = x if product is None else product @ x
    return x.to(how.dtype)
