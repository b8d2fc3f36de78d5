"""Rules between the keys of pipeline parallelism and the rest."""

from __future__ import annotations

import re

from launcher.config.fields import AUTO
from launcher.config.positions import Path
from launcher.config.rules import Problem
from launcher.config.schema import Config
from launcher.config.schema_parallel import Pipeline
from launcher.sharding.pipeline import DEFAULT_SCHEDULE, SCHEDULES, PipelinePlan, virtual_problem

_METHODS = ("best", "parameters", "uniform", "profile")


def pipeline_problems(config: Config) -> list[Problem]:
    """Return what cannot be done with the pipeline that a config asks for."""
    section = config.pipeline
    problems = _partition_problems(section.partition)
    num_virtual, path = section.virtual_stages, ("pipeline", "virtual_stages")
    if _are_decided(section):
        found = virtual_problem(section.schedule, num_virtual)
        if found is not None:
            problems.append((path, *found))
        elif section.stages == 1 and num_virtual > 1:
            message = f"virtual_stages {num_virtual} divides the stages of several ranks, and pipeline.stages is 1"
            problems.append((path, message, "remove virtual_stages"))
    stages = section.stages
    if not _is_on(config):
        return problems
    if not config.managed_gradient_accumulation:
        message = (
            "managed_gradient_accumulation false is not supported with pipeline parallelism: train_batch() runs all"
            " micro-batches of a step"
        )
        problems.append((("managed_gradient_accumulation",), message, "remove it"))
    zero = config.zero_optimization.stage
    if zero in (2, 3):
        what = "sums" if zero == 2 else "gathers parameters and sums"
        message = (
            f"ZeRO stage {zero} {what} gradients over the ranks in every micro-batch, which a pipeline has many of in"
            f" one step; its stages divide parameters and gradients by {stages} already"
        )
        problems.append((("zero_optimization", "stage"), message, "use stage 0 or 1 with pipeline parallelism"))
    return problems


def unused_schedule(config: Config) -> list[tuple[Path, str]]:
    """Return that a schedule has no effect, where there is one stage."""
    schedule = config.pipeline.schedule
    if schedule in (DEFAULT_SCHEDULE, AUTO) or _is_on(config):
        return []
    return [(("pipeline", "schedule"), f'pipeline.schedule "{schedule}" has no effect: the model is one stage')]


def micro_batch_problems(config: Config, num_micro_batches: int | None) -> tuple[list[Problem], list[Problem]]:
    """Return what is wrong, and what is slow, with a number of micro-batches a step; None: not known."""
    steps = num_micro_batches if num_micro_batches is not None else config.gradient_accumulation_steps
    plan = pipeline_plan(config, steps if isinstance(steps, int) else None)
    if plan is None or not isinstance(steps, int):
        return [], []
    path: Path = ("gradient_accumulation_steps",)
    problem = plan.problem()
    if problem is not None:
        return [(path, *problem)], []
    wanted = 2 * plan.num_ranks if SCHEDULES[plan.schedule].is_v_shaped else plan.num_ranks
    if steps >= wanted:
        return [], []
    message = (
        f"{steps} micro-batches a step leave the {plan.num_ranks} ranks of a pipeline idle for"
        f" {plan.idle_fraction:.0%} of it or more"
    )
    return [], [(path, message, f"use {wanted} or more")]


def pipeline_plan(config: Config, num_micro_batches: int | None) -> PipelinePlan | None:
    """Return the pipeline that a config asks for; None where it asks for none, or leaves its size open.

    num_micro_batches: of one step; None: 1.
    """
    section = config.pipeline
    if section.stages is None or not _is_on(config) or not _are_decided(section):
        return None
    if virtual_problem(section.schedule, section.virtual_stages) is not None:
        return None
    return PipelinePlan(section.stages, section.virtual_stages, section.schedule, num_micro_batches or 1)


def _are_decided(section: Pipeline) -> bool:
    """Whether schedule and virtual stages have values: neither is "auto", nor was it wrong and reported."""
    return section.schedule in SCHEDULES and type(section.virtual_stages) is int


def _is_on(config: Config) -> bool:
    stages = config.pipeline.stages
    return type(stages) is int and stages > 1


def _partition_problems(method: str) -> list[Problem]:
    kind, _, pattern = method.partition(":")
    path: Path = ("pipeline", "partition")
    if method == AUTO or kind.lower() in _METHODS:
        return []
    if kind.lower() != "type":
        hint = 'use "best", "parameters", "uniform", "profile", or "type:" and a regular expression'
        return [(path, f'there is no partition by "{method}"', hint)]
    try:
        re.compile(pattern)
    except re.error as error:
        return [(path, f'"{pattern}" is not a regular expression: {error}', "names of classes are searched with it")]
    return []
