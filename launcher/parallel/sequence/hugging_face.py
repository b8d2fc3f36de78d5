"""Models of Hugging Face: their attention exchanges heads, their forward says which tokens this rank has.

Bekman et al., "Arctic Long Sequence Training", https://arxiv.org/abs/2506.13996, section 3.2. A hook before the forward
makes one `WholeSequence` of the ranks' positions and masks, and hands it to the model as a keyword, which models pass
on to their attention function. Under the name that the model asks for that function is ours, which leaves calls without
the keyword, such as those of other models, as they are. Nothing here imports transformers: a model of it brings it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from launcher.base.errors import EngineError
from launcher.comm.groups import RankGroup
from launcher.comm.torch_internals import outside_graphs
from launcher.parallel.sequence.exchange import check_heads, gather_heads, scatter_heads
from launcher.parallel.sequence.positions import OwnPositions, are_made_positions

_KEYWORD = "sequence_parallel"
_WORKING = ("sdpa", "flash_attention_2", "flash_attention_3")
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
# Modules that mix positions by themselves: each rank would begin anew with its part.
_MIXING = (nn.Conv1d, nn.RNNBase)


class WholeSequence:
    """What attention needs to know of all ranks' tokens in one forward."""

    def __init__(self, ranks: RankGroup, position_ids: Tensor, is_token: Tensor | None, *, has_gaps: bool) -> None:
        """position_ids: [batch, length], of whole sequences. is_token: the same shape, False where there is padding;
        None: there is none. has_gaps: positions may begin anew within a sequence, which then holds several documents.
        """
        self.ranks = ranks
        self.position_ids = position_ids
        self.is_token = None if is_token is None or bool(is_token.all()) else is_token
        document = (position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1) if has_gaps else None
        self._document = document if document is not None and bool((document > 0).any()) else None
        self._masks: dict[tuple[bool, int | None], Tensor | None] = {}

    def mask(self, *, is_causal: bool, window: int | None) -> Tensor | None:
        """Return which token sees which, [batch, 1, length, length]; None where `is_causal` alone says so.

        window: how many tokens each sees, itself included. Padding behind all tokens needs no mask under causal
        attention: only padding sees it. Memory: length² bytes a sequence, once a forward.
        """
        if (is_causal, window) not in self._masks:
            self._masks[is_causal, window] = self._mask(is_causal, window)
        return self._masks[is_causal, window]

    def _mask(self, is_causal: bool, window: int | None) -> Tensor | None:
        length = self.position_ids.shape[1]
        window = None if window is None or window >= length else window
        padding = self.is_token
        if is_causal and padding is not None and not bool((padding[:, 1:] > padding[:, :-1]).any()):
            padding = None
        if window is None and padding is None and self._document is None:
            return None
        place = torch.arange(length, device=self.position_ids.device)
        # Comparisons alone: distances would be length² integers.
        sees = place[:, None] >= (place if is_causal else place.new_zeros(length))
        if window is not None:
            sees &= (place[:, None] < place + window) & (place[:, None] > place - window)
        sees = sees[None]
        if self._document is not None:
            sees = sees & (self._document[:, :, None] == self._document[:, None])
        if padding is not None:
            sees = sees & padding[:, None]  # padding in front sees nothing, as in transformers: torch returns zeros
        return sees[:, None]


def hugging_face_models(model: nn.Module) -> list[Any]:
    """Return the outermost models of transformers in `model`, which may be one itself."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return []
    found: list[Any] = []

    def search(module: nn.Module) -> None:
        if isinstance(module, library.PreTrainedModel):
            found.append(module)
            return
        for child in module.children():
            search(child)

    search(model)
    return found


def check_model(model: Any, num_ranks: int, num_tensor_ranks: int = 1) -> None:
    """Raise EngineError for a model of transformers that cannot be computed on parts of sequences.

    num_ranks: of one sequence. num_tensor_ranks: that have a layer's heads together.
    """
    name, config = type(model).__name__, model.config
    where = f"sequence parallelism of {name}"
    if getattr(config, "is_encoder_decoder", False) or config.get_text_config() is not config:
        raise EngineError(
            "encoder-decoders, and models of images or sound, are not computed on parts of sequences",
            where=where,
            hint='remove "sequence_parallel_size"',
        )
    mixing = {type(module).__name__ for module in model.modules() if isinstance(module, _MIXING)}
    mixing |= set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if mixing:
        raise EngineError(
            f"the layers {', '.join(sorted(mixing))} mix tokens without attention: on each rank they would begin anew"
            " with its part of the sequence",
            where=where,
            hint="use a model of attention layers alone",
        )
    check_implementation(getattr(config, "_attn_implementation", None), where)
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters) or not any(p.name == "position_ids" for p in parameters):
        raise EngineError(
            "its forward lacks position_ids, or further keywords for its attention: parts of a sequence need both",
            where=where,
            hint="use a model whose forward(..., position_ids=..., **kwargs) has them",
        )
    num_heads = getattr(config, "num_attention_heads", None)
    if isinstance(num_heads, int) and num_heads % num_tensor_ranks == 0:
        check_heads(num_heads // num_tensor_ranks, num_ranks, where)


def check_implementation(name: Any, where: str) -> None:
    """Raise EngineError for an attention of transformers that cannot work on the whole sequence of several ranks."""
    if name in _WORKING or (isinstance(name, str) and "/" in name and "flash" in name):
        return
    reasons = {
        "eager": "it belongs to each model's own code, where nothing can replace it, and keeps length² scores",
        "flex_attention": "its block masks are made for one rank's part",
    }
    raise EngineError(
        f'the attention "{name}" cannot exchange heads between ranks'
        + (f": {reasons[name]}" if name in reasons else ""),
        where=where,
        hint=f'load the model with attn_implementation="sdpa" (or {", ".join(_WORKING[1:])})',
    )


def attach(model: Any, ranks: RankGroup, is_whole_in_eval: Callable[[], bool]) -> RemovableHandle:
    """Have a model that `check_model` has passed compute parts of sequences, until the handle is removed.

    is_whole_in_eval: whether each rank has a whole sequence of its own in this forward, if the model is in eval mode:
    not where it trains, in the mode that `from_pretrained` leaves it in.
    Side effects: the attention function of that name in transformers is wrapped, once a process.
    """
    _register(model.config._attn_implementation)
    before = _BeforeForward(model, ranks, is_whole_in_eval)
    handle: RemovableHandle = model.register_forward_pre_hook(outside_graphs(before), with_kwargs=True)
    return handle


class _BeforeForward:
    """Says which tokens this rank has, before each forward."""

    def __init__(self, model: nn.Module, ranks: RankGroup, is_whole_in_eval: Callable[[], bool]) -> None:
        self._names = list(inspect.signature(model.forward).parameters)
        loss: Any = getattr(model, "loss_function", None)
        self._shifts_labels = callable(loss) and "shift_labels" in inspect.signature(loss).parameters
        self._ranks = ranks
        self._is_whole_in_eval = is_whole_in_eval
        self._positions = OwnPositions(model)

    def __deepcopy__(self, _: Any) -> _BeforeForward:
        return self

    def __call__(self, model: nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        given = {**dict(zip(self._names, args, strict=False)), **given}
        # `generate` brings a cache of its own: every rank has the whole text then.
        if not model.training and (self._is_whole_in_eval() or given.get("past_key_values") is not None):
            return None
        inputs = given.get("input_ids")
        tokens: Any = given.get("inputs_embeds") if inputs is None else inputs
        if not isinstance(tokens, Tensor):
            return None  # the model itself says what it lacks
        if self._shifts_labels and given.get("labels") is not None and given.get("shift_labels") is None:
            raise EngineError(
                "the model would shift labels within each part of a sequence, and lose those at its ends",
                hint="give it shift_labels, as launcher.shard_sequence returns them, and labels=shift_labels",
            )
        whole = self._whole(tokens, given.get("position_ids"), given.get("attention_mask"))
        self._positions.check(whole.position_ids, whole.is_token)
        part = slice(self._ranks.rank * tokens.shape[1], (self._ranks.rank + 1) * tokens.shape[1])
        own = given.get("position_ids")
        own = whole.position_ids[:, part] if own is None else own
        return (), {**given, "position_ids": own, "attention_mask": None, _KEYWORD: whole}

    def _whole(self, tokens: Tensor, position_ids: Any, mask: Any) -> WholeSequence:
        size, length = tokens.shape[:2]
        known = {"position_ids": position_ids, "attention_mask": mask}
        for name, value in known.items():
            if value is not None and tuple(getattr(value, "shape", ())) not in ((size, length), (1, length)):
                raise EngineError(
                    f"{name} is not of this rank's part, {size} × {length} tokens",
                    hint="cut the batch with launcher.shard_sequence; masks are [batch, length]",
                )
        if are_made_positions(position_ids, self._ranks.rank, self._ranks.world_size):
            known["position_ids"] = None  # nothing to ask the ranks for, nor the device
        sent = [value.to(torch.int64).expand(size, length) for value in known.values() if value is not None]
        rows: list[Tensor] = []
        if sent:
            of_ranks = self._ranks.communicator.gather_rows(torch.stack(sent))
            rows = list(of_ranks.permute(1, 2, 0, 3).flatten(2))
        is_token = None if mask is None else rows.pop() != 0
        if rows:
            # Transformers looks for several documents where no mask is given.
            return WholeSequence(self._ranks, rows[0], is_token, has_gaps=mask is None)
        places = torch.arange(length * self._ranks.world_size, device=tokens.device).expand(size, -1)
        return WholeSequence(self._ranks, places, is_token, has_gaps=False)


def _register(name: str) -> None:
    functions: Any = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    inner = functions[name]
    if not isinstance(inner, _Attention):
        functions.register(name, _Attention(inner, is_flash="flash" in name))


class _Attention:
    """An attention function of transformers, on whole sequences with this rank's heads."""

    def __init__(self, inner: Callable[..., Any], *, is_flash: bool) -> None:
        self._inner = inner
        self._is_flash = is_flash
        functools.update_wrapper(self, inner)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **more: Any
    ) -> Any:
        """query, key, value: [batch, heads, length, features]. Returns [batch, length, heads, features], weights."""
        whole: WholeSequence | None = more.pop(_KEYWORD, None)
        if whole is None:
            return self._inner(module, query, key, value, mask, *args, **more)
        by_head = [name for name in ("s_aux", "position_bias") if more.get(name) is not None]
        if by_head:
            raise EngineError(f"attention with {by_head[0]}, which it has for each head, has no sequence parallelism")
        query, key, value = scatter_heads(whole.ranks, query, key, value, head_dim=1, sequence_dim=2)
        if "position_ids" in more:
            more["position_ids"] = whole.position_ids
        if self._is_flash:
            mask = whole.is_token
        else:
            is_causal = more.get("is_causal")
            is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            mask = whole.mask(is_causal=is_causal, window=more.get("sliding_window"))
        with _query_groups(module, query.shape[1] // key.shape[1]):
            output, _ = self._inner(module, query, key, value, mask, *args, **more)
        return gather_heads(whole.ranks, output, head_dim=2, sequence_dim=1), None


@contextlib.contextmanager
def _query_groups(module: Any, num_groups: int) -> Iterator[None]:
    """Have an attention module count so many heads of queries for each of keys, where it counts them."""
    before = getattr(module, "num_key_value_groups", num_groups)
    if before != num_groups:
        module.num_key_value_groups = num_groups
    try:
        yield
    finally:
        if before != num_groups:
            module.num_key_value_groups = before
