"""The batch equation: train_batch_size = micro-batch × accumulation steps × ranks. Exact, or an error."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.base.errors import ConfigAssertionError

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class BatchPlan:
    """The three sizes, solved; their product with `world_size` is exact."""

    train_batch_size: int  # samples of one optimizer step over all ranks
    micro_batch_size: int  # samples of one forward of one rank
    accumulation_steps: int  # micro-batches of one optimizer step
    world_size: int  # data-parallel ranks

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes in the order of BATCH_KEYS."""
        return self.train_batch_size, self.micro_batch_size, self.accumulation_steps


def solve_batch(
    train_batch_size: int | None,
    micro_batch_size: int | None,
    accumulation_steps: int | None,
    world_size: int,
    model_size: int = 1,
) -> BatchPlan:
    """Fill in what is missing of the batch equation. world_size: ranks with different samples.

    model_size: ranks that work on the same samples. DeepSpeed and transformers count these in `train_batch_size`, too:
    where all three sizes are given and fit all ranks, that is taken over, and the batch is the number of samples.
    Two given: the third follows. Only one of the batch sizes given: one accumulation step. A division that
    leaves a remainder is an error: a smaller batch than asked for would change the training silently.
    Raises: ConfigAssertionError with the equation.
    """
    train, micro, steps = train_batch_size, micro_batch_size, accumulation_steps
    if train and micro and steps and train == micro * steps * world_size * model_size:
        train //= model_size
    if train is None and micro is None:
        raise ConfigAssertionError(
            "neither train_batch_size nor train_micro_batch_size_per_gpu is given",
            hint='give one, such as "train_micro_batch_size_per_gpu": 8',
        )
    if train is None and micro is not None:
        steps = steps or 1
        train = micro * steps * world_size
    elif train is not None and micro is None:
        steps = steps or 1
        micro = _divide(train, steps * world_size, f"{steps} (accumulation) × {world_size} (ranks)")
    elif train is not None and micro is not None and steps is None:
        steps = _divide(train, micro * world_size, f"{micro} (micro) × {world_size} (ranks)")
    if train is None or micro is None or steps is None:
        raise RuntimeError("every case above fills all three sizes")
    if train != micro * steps * world_size:
        raise ConfigAssertionError(
            f"train_batch_size {train} ≠ {micro} (micro) × {steps} (accumulation) × {world_size} (ranks)"
            f" = {micro * steps * world_size}",
            hint="give two of the three, and the third follows",
        )
    return BatchPlan(train, micro, steps, world_size)


def _divide(train: int, divisor: int, what: str) -> int:
    quotient, remainder = divmod(train, divisor)
    if remainder or quotient == 0:
        near = max(1, round(train / divisor)) * divisor
        raise ConfigAssertionError(
            f"train_batch_size {train} is not divisible by {what} = {divisor}", hint=f"the nearest is {near}"
        )
    return quotient
