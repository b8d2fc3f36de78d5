"""What `"auto"` becomes: the one place that decides, with a reason for each choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from launcher.base.errors import ConfigError, Diagnostic
from launcher.config.elastic import elastic_batch_of
from launcher.config.equations import BATCH_KEYS, solve_batch
from launcher.config.fields import AUTO, Section, is_list_of_sections
from launcher.config.schema import Config
from launcher.config.schema_params import OPTIMIZER_PARAMS, SCHEDULER_PARAMS


@dataclass(frozen=True)
class AutoFacts:
    """What is known about the run; None: unknown."""

    world_size: int | None = None  # all ranks
    model_size: int = 1  # of these, that work on the same samples together
    micro_batch_size: int | None = None
    accumulation_steps: int | None = None
    hidden_size: int | None = None
    lr: float | None = None
    betas: list[float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    max_grad_norm: float | None = None
    warmup_num_steps: int | None = None
    total_num_steps: int | None = None
    bf16: bool | None = None
    fp16: bool | None = None


@dataclass(frozen=True)
class AutoChoice:
    """One resolved key."""

    key: str
    value: Any
    reason: str


def _from_facts(facts: AutoFacts) -> dict[str, tuple[Any, str]]:
    """Return key path -> value and reason, for the facts that are known."""
    hidden = facts.hidden_size
    table: dict[str, tuple[Any, str]] = {
        "train_micro_batch_size_per_gpu": (facts.micro_batch_size, "the trainer's micro-batch"),
        "gradient_accumulation_steps": (facts.accumulation_steps, "the trainer's accumulation"),
        "gradient_clipping": (facts.max_grad_norm, "the trainer's largest gradient norm"),
        "bf16.enabled": (facts.bf16, "the trainer's precision"),
        "fp16.enabled": (facts.fp16, "the trainer's precision"),
        "optimizer.params.lr": (facts.lr, "the trainer's learning rate"),
        "optimizer.params.betas": (facts.betas, "the trainer's betas"),
        "optimizer.params.eps": (facts.eps, "the trainer's epsilon"),
        "optimizer.params.weight_decay": (facts.weight_decay, "the trainer's weight decay"),
        "scheduler.params.warmup_max_lr": (facts.lr, "the trainer's learning rate"),
        "scheduler.params.warmup_num_steps": (facts.warmup_num_steps, "the trainer's warm-up"),
        "scheduler.params.total_num_steps": (facts.total_num_steps, "the trainer's number of steps"),
    }
    if hidden is not None:
        zero = "zero_optimization."
        table[zero + "reduce_bucket_size"] = (hidden * hidden, "hidden size²")
        table[zero + "stage3_prefetch_bucket_size"] = (int(0.9 * hidden * hidden), "0.9 × hidden size²")
        table[zero + "stage3_param_persistence_threshold"] = (10 * hidden, "10 × hidden size")
    return {key: found for key, found in table.items() if found[0] is not None}


def resolve_auto(config: Config, facts: AutoFacts) -> tuple[Config, tuple[AutoChoice, ...]]:
    """Replace every `"auto"` by a value: from the facts, else the key's default. Returns what was chosen.

    Raises: ConfigError for keys that have neither, all of them at once.
    """
    resolution = _Resolution(_from_facts(facts))
    resolved = resolution.section(config, "")
    if resolution.missing:
        hint = "give a value; a Trainer fills it in"
        raise ConfigError.from_diagnostics(
            [Diagnostic(f'"auto" cannot be resolved here: {key}', None, hint) for key in resolution.missing]
        )
    return _solve_batch(resolved, tuple(resolution.choices), facts)


def left_open(config: Config) -> tuple[Diagnostic, ...]:
    """Return what no run can begin without and the config does not say: its Trainer, or its script, must fill it in."""
    found: list[Diagnostic] = []
    sizes: tuple[object, ...] = (config.train_batch_size, config.train_micro_batch_size_per_gpu)
    if all(size in (None, AUTO) for size in sizes) and config.elasticity.enabled is not True:
        what = '"auto"' if AUTO in sizes else "not given"
        found.append(
            Diagnostic(
                f"the batch size is {what}: a Trainer must fill it in, initialize() alone refuses to begin",
                BATCH_KEYS[1],
                'without a Trainer give it, such as "train_micro_batch_size_per_gpu": 8',
            )
        )
    try:
        resolve_auto(config, AutoFacts())
    except ConfigError as error:
        found += error.diagnostics
    return tuple(found)


def _solve_batch(
    config: Config, choices: tuple[AutoChoice, ...], facts: AutoFacts
) -> tuple[Config, tuple[AutoChoice, ...]]:
    """Set the sizes that `elasticity` decides; else those that were "auto", no fact known, by the batch equation.

    Raises: ConfigError.
    """
    elastic, world_size = elastic_batch_of(config), facts.world_size
    if elastic is not None and world_size is not None:
        sizes = dict(zip(BATCH_KEYS, elastic.plan_for(world_size).sizes, strict=True))
        reason = f"elasticity: the batch fits {elastic.range_text}"
        others = tuple(choice for choice in choices if choice.key not in BATCH_KEYS)
        return config.model_copy(update=sizes), others + tuple(AutoChoice(k, v, reason) for k, v in sizes.items())
    undecided = {choice.key for choice in choices if choice.key in BATCH_KEYS and choice.value is None}
    if not undecided or world_size is None:
        return config, choices
    plan = solve_batch(
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
        world_size // facts.model_size,
    )
    sizes = dict(zip(BATCH_KEYS, plan.sizes, strict=True))
    solved = tuple(
        AutoChoice(choice.key, sizes[choice.key], "the batch equation") if choice.key in undecided else choice
        for choice in choices
    )
    return config.model_copy(update={key: sizes[key] for key in undecided}), solved


_S = TypeVar("_S", bound=Section)


class _Resolution:
    """Replaces what is "auto" in the sections of a config, and keeps what was chosen and what has no value."""

    def __init__(self, table: dict[str, tuple[Any, str]]) -> None:
        self._table = table
        self.choices: list[AutoChoice] = []
        self.missing: list[str] = []

    def section(self, section: _S, path: str) -> _S:
        """Return a section without "auto". path: of the section, with a dot at its end."""
        changed: dict[str, Any] = {}
        for name in type(section).model_fields:
            value, key = getattr(section, name), f"{path}{name}"
            if isinstance(value, Section):
                resolved = self.section(value, f"{key}.")
                if resolved is not value:
                    changed[name] = resolved
            elif is_list_of_sections(type(section), name):
                changed[name] = [self.section(item, f"{key}[{at}].") for at, item in enumerate(value)]
            elif name == "params" and isinstance(value, dict):
                known = OPTIMIZER_PARAMS if path == "optimizer." else SCHEDULER_PARAMS
                kind = known[section.type]  # type: ignore[attr-defined]  # only these two sections have params
                changed[name] = {part: self._value(kind, part, item, f"{key}.{part}") for part, item in value.items()}
            elif value == AUTO:
                changed[name] = self._value(type(section), name, value, key)
        return section.model_copy(update=changed) if changed else section

    def _value(self, section: type[Section], name: str, value: Any, key: str) -> Any:
        field = section.model_fields[name]
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        # Some keys of other releases have "auto" itself as their default.
        if value != AUTO or default == AUTO:
            return value
        if key in self._table:
            chosen, reason = self._table[key]
        elif field.is_required():
            self.missing.append(key)
            return value
        else:
            chosen, reason = default, "the default: nothing else is known here"
        self.choices.append(AutoChoice(key, chosen, reason))
        return chosen
