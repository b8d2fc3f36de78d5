"""Which parameters are gathered in the type of torch.autocast: those that it casts to that type before every use.

Gathered in fp32 they would be sent with twice the bytes, and autocast would keep a 16-bit copy of each until backward:
of the whole model, at stage 3 too. The cast before the gather gives the same bits as the one after it. The shards stay
fp32, and so does what autocast computes in fp32: norms, embeddings, weights that something else reads as well.
"""

from __future__ import annotations

from torch import nn

from launcher.zero.leaves import external_parameters

_FP32_MARK = "_launch_computes_in_fp32"
_CAST_MODULES = (
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_CAST_NAMES = ("weight", "bias")


def mark_fp32(module: nn.Module) -> None:
    """Mark a module whose forward runs without autocast."""
    setattr(module, _FP32_MARK, True)


def params_cast_by_autocast(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that only modules read which hand them to a function of autocast's 16-bit list."""
    cast: set[nn.Parameter] = set()
    others: set[nn.Parameter] = set()
    for module in model.modules():
        forward = type(module).forward
        is_cast = any(forward is kind.forward for kind in _CAST_MODULES) and not module.__dict__.get(_FP32_MARK, False)
        for name, param in module.named_parameters(recurse=False):
            (cast if is_cast and name in _CAST_NAMES else others).add(param)
        others.update(external_parameters(module))
    return cast - others
