"""How a layer is split, and the words that others have for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import nn

from launcher.base.errors import EngineError


class Style(Enum):
    """What the ranks of a group do with one layer."""

    COLUMN = "column"  # each rank computes a part of the outputs
    COLUMN_GATHERED = "column_gathered"  # the same; the outputs are gathered
    ROW = "row"  # each rank has a part of the inputs; the outputs are summed
    ROW_SPLIT_INPUT = "row_split_input"  # the same; the inputs are whole, and each rank takes its part
    PACKED_COLUMN = "packed_column"  # several layers in one weight, each of them split as COLUMN
    PACKED_ROW = "packed_row"  # several inputs one after another, each of them split as ROW
    VOCABULARY = "vocabulary"  # an embedding: each rank has a part of the rows; the outputs are summed
    REPLICATED = "replicated"  # every rank computes all of it
    REPLICATED_SUMMED_GRAD = "replicated_summed_grad"  # the same on a part of the data: its gradients are summed

    @property
    def is_split(self) -> bool:
        """Whether the ranks hold different parts."""
        return self not in (Style.REPLICATED, Style.REPLICATED_SUMMED_GRAD)

    @property
    def is_column(self) -> bool:
        """Whether a rank's part of the outputs is what the next layer gets."""
        return self in (Style.COLUMN, Style.PACKED_COLUMN)

    @property
    def takes_whole(self) -> bool:
        """Whether inputs and outputs are whole, so that the layer may as well stay whole."""
        return self in (Style.COLUMN_GATHERED, Style.ROW_SPLIT_INPUT, Style.VOCABULARY)


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is split."""

    style: Style
    blocks: tuple[int, ...] | None = None  # sizes of the layers in a packed one; None: to be found out


# Hugging Face's words, of transformers 4.57 and 5.
HF_STYLES = {
    "colwise": Style.COLUMN,
    "local_colwise": Style.COLUMN,
    "colwise_rep": Style.COLUMN_GATHERED,
    "colwise_gather_output": Style.COLUMN_GATHERED,
    "rowwise": Style.ROW,
    "local_rowwise": Style.ROW,
    "rowwise_rep": Style.ROW_SPLIT_INPUT,
    "rowwise_split_input": Style.ROW_SPLIT_INPUT,
    "packed_colwise": Style.PACKED_COLUMN,
    "local_packed_colwise": Style.PACKED_COLUMN,
    "packed_rowwise": Style.PACKED_ROW,
    "local_packed_rowwise": Style.PACKED_ROW,
    "embedding_rowwise": Style.VOCABULARY,
    "embedding_colwise": Style.VOCABULARY,
    "replicate": Style.REPLICATED,
    "sequence_parallel": Style.REPLICATED,
    "replicated_with_grad_allreduce": Style.REPLICATED_SUMMED_GRAD,
}
# Words about containers, whose layers have words of their own: the sums are the layers' here.
HF_WITHOUT_EFFECT = frozenset({"gather", "local", "all_reduce", "isolated"})
# Words about experts, which stay whole.
HF_EXPERTS = frozenset(
    {
        "ep_dispatch_experts",
        "ep_router",
        "gather_expert",
        "grouped_gemm",
        "moe_experts_allreduce",
        "moe_identity_expert",
        "moe_tp_experts",
    }
)


def style_of(value: Any, module: nn.Module, where: str) -> LayerPlan:
    """Return what a plan in Python says of a module: our word or Hugging Face's, a `LayerPlan`, a style of torch.

    where: for errors. Raises: EngineError for anything else.
    """
    if isinstance(value, LayerPlan):
        return value
    if isinstance(value, Style):
        return LayerPlan(value)
    if isinstance(value, str):
        names = {style.value: style for style in Style} | HF_STYLES
        found = names.get(value.lower())
        if found is None:
            raise EngineError(f'"{value}" is not a style', where=where, hint=f"one of {', '.join(names)}")
        return LayerPlan(found)
    return LayerPlan(_of_torch(value, module, where))


def _of_torch(value: Any, module: nn.Module, where: str) -> Style:
    """Return what an object of `torch.distributed.tensor.parallel` asks for."""
    kind = type(value).__name__
    inputs, outputs = (_layout(value, name) for name in ("input_layouts", "output_layouts"))
    is_embedding = isinstance(module, nn.Embedding)
    found = {
        ("ColwiseParallel", "Replicate", "Shard(-1)"): None if is_embedding else Style.COLUMN,
        ("ColwiseParallel", "Replicate", "Replicate"): Style.VOCABULARY if is_embedding else Style.COLUMN_GATHERED,
        ("RowwiseParallel", "Shard(-1)", "Replicate"): None if is_embedding else Style.ROW,
        ("RowwiseParallel", "Replicate", "Replicate"): Style.VOCABULARY if is_embedding else Style.ROW_SPLIT_INPUT,
    }.get((kind, inputs, outputs))
    if found is None:
        layouts = f" with input_layouts {inputs} and output_layouts {outputs}" if inputs else ""
        raise EngineError(
            f"{kind}{layouts} of {type(module).__name__} is not supported",
            where=where,
            hint="ColwiseParallel and RowwiseParallel are, with Shard(-1) between the two and Replicate elsewhere",
        )
    return found


def _layout(value: Any, name: str) -> str:
    layouts = getattr(value, name, ())
    layout = layouts[0] if isinstance(layouts, tuple | list) and layouts else layouts
    kind, dim = type(layout).__name__, getattr(layout, "dim", None)
    if layout == ():
        return ""
    return kind if dim is None else f"{kind}({dim})"
