"""Runs the contract on any engine, in or out of the tree, and reports row by row.

One rank of two tiny models in this process, then two ranks in each layout as processes of their own.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

from torch.multiprocessing import ProcessRaisedException

from ownloop_doctors.check_parts import parse_layout
from ownloop_doctors.one_rank import MODEL_CHECKS, STATE_CHECKS, Subject
from ownloop_doctors.several_ranks import LAYOUT_CHECKS, Build, LayoutResults, layout_script, run_layout
from rl.checks import see_working_directory
from rl.tiny_models import tiny_llama, tiny_qwen3
from trainer.config import TrainerConfig
from trainer.engine_table import find_engine
from trainer.engines import load_engine
from trainer.engines.base import Engine
from trainer.engines.model_check import check_model

Outcome = Literal["passed", "failed", "refused"]
_REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    subject: str
    """The model or the layout that was checked."""
    check: str
    outcome: Outcome
    """`refused` if the engine says that it has no such layout, which it may."""
    detail: str
    """What was measured, or what is wrong."""


Report = Callable[[Finding], None]


def check_engine(name: str, layouts: Sequence[str], scratch: Path, report: Report) -> bool:
    """Runs every check on the engine and reports each. Returns whether the engine passed.

    `name` is an engine's own, or `module:class`. Each of `layouts` is of several ranks, such as `tensor_parallel=2`.
    Raises ValueError if there is no such engine or layout, or if the engine cannot run here.
    """
    chosen = {text: parse_layout(text) for text in layouts}
    build = builder(name)
    engine = "torchtitan" if ":" in name else name  # a class is built directly, and need not look at its name
    outcomes: list[Outcome] = []

    def note(finding: Finding) -> None:
        outcomes.append(finding.outcome)
        report(finding)

    models = {"one rank, tied": tiny_llama(scratch / "tied"), "one rank": tiny_qwen3(scratch / "untied", tied=False)}
    for subject, model in models.items():
        config = TrainerConfig(model=model, engine=engine, compute_dtype="float32")
        if build is load_engine:  # the layout check of an engine of the tree
            check_model(config)  # raises what every check would fail with, such as a package that is not installed
        _check_one_rank(subject, partial(build, config), model, scratch / model.name / "files", note)
    one = TrainerConfig(model=models["one rank"], engine=engine, compute_dtype="float32", max_tokens_per_microbatch=50)
    for text, layout in chosen.items():
        _check_layout(text, build, replace(one, **layout), one, scratch / text, note)
    return "failed" not in outcomes


def builder(name: str) -> Build:
    """Makes a function that builds the engine. Raises ValueError if there is no such engine."""
    if ":" not in name:
        find_engine(name)
        return load_engine
    see_working_directory()
    _engine_class(name)
    return partial(_build_class, name)


def _engine_class(name: str) -> type[Engine]:
    try:
        found: Any = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"engine {name!r} cannot be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise ValueError(f"engine {name!r} is {found!r}; a subclass of trainer.engines.base.Engine is needed")
    return found


def _build_class(name: str, config: TrainerConfig) -> Engine:
    build: Any = _engine_class(name)
    engine: Engine = build(config)
    return engine


def _check_one_rank(subject: str, build: Callable[[], Engine], model: Path, scratch: Path, report: Report) -> None:
    scratch.mkdir()
    for name, check in {**MODEL_CHECKS, **STATE_CHECKS}.items():
        report(_finding(subject, name, partial(check, Subject(build, model, scratch))))


def _check_layout(
    subject: str, build: Build, config: TrainerConfig, one: TrainerConfig, scratch: Path, report: Report
) -> None:
    try:
        if build is load_engine:
            check_model(config)
        many = run_layout(_script_or_refusal, build, config, scratch / "many")
    except (ValueError, ProcessRaisedException) as error:
        outcome: Outcome = "refused" if isinstance(error, ValueError) else "failed"
        # the last line of a process's error is its message
        report(Finding(subject, "start", outcome, str(error).strip().splitlines()[-1]))
        return
    if _REFUSED in many:  # only the ranks of an engine could know
        report(Finding(subject, "start", "refused", many[_REFUSED]))
        return
    results = LayoutResults(
        config, many, run_layout(layout_script, build, one, scratch / "one"), scratch / "many", build
    )
    for name, check in LAYOUT_CHECKS.items():  # the layout's results are shared: starting ranks takes seconds
        report(_finding(subject, name, partial(check, results)))


def _script_or_refusal(build: Build, config: TrainerConfig, rank: int, directory: Path) -> dict[str, Any]:
    """The script; or, if the engine refuses to be built in this layout, why."""
    try:
        engine = build(config)
    except ValueError as error:
        return {_REFUSED: str(error)}
    return layout_script(lambda _: engine, config, rank, directory)


def _finding(subject: str, name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, name, "passed", check())
    except AssertionError as error:
        return Finding(subject, name, "failed", str(error) or traceback.format_exc().splitlines()[-2].strip())
    except Exception as error:  # any exception of a stranger's engine is a finding
        return Finding(subject, name, "failed", f"{type(error).__name__}: {error}")
