import io
import math
import re

import pytest
import rich.console

from controller.runs.console import Console, step_line
from rl.rollouts.evaluation import Evaluation
from rl.types import Completion, Group
from tests.rl.fakes import single_turn

METRICS = {
    "step": 3.0,
    "reward_mean": 0.25,
    "reward_std": 0.433,
    "loss": -0.0123,
    "grad_norm": 1.234,
    "learning_rate": 2e-5,
    "logprob_mismatch_mean": 0.0312,
    "generation_tokens_per_s": 812.4,
    "training_tokens_per_s": 640.2,
    "seconds_generate": 3.21,
    "seconds_forward_backward": 2.5,
    "seconds_push": 0.04,
    "seconds_step": 6.1,
}


def group(reward: float, text: str = "It is 4.") -> Group:
    """A group of one rollout."""
    completion = Completion(tokens=(1,), logprobs=(-0.1,), versions=(0,), text=text, finish_reason="stop")
    rollout = single_turn((1,), completion, reward=reward)
    return Group(problem_id="p", prompt="What is\n2+2?", rollouts=(rollout,))


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(
    console_calls: list[tuple[object, ...]], stream: io.StringIO | None = None, seconds_between: float = 10.0
) -> list[str]:
    """The lines that a stream, by default one that is no terminal, gets from these calls."""
    stream = stream or io.StringIO()
    console = Console(stream, seconds_between=seconds_between)
    for name, *arguments in console_calls:
        getattr(console, str(name))(*arguments)
    return stream.getvalue().splitlines()


def test_a_step_is_one_line_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    (line,) = shown([("step", METRICS, 40)])
    assert line == (
        " 3/40  reward 0.250±0.43  loss -0.0123  grad 1.23  lr 2e-05  mismatch 0.0312  tok/s 812/640"
        "  6.1 s (generate 3.2 train 2.5 push 0.0)"
    )


@pytest.mark.stranger("F8")
@pytest.mark.parametrize("columns", [None, 40, 80, 100, 120])
@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
@pytest.mark.parametrize("changed", [{}, {"step": 12345.0, "reward_mean": -1234.5, "staleness_mean": 3.5, "loss": 1e6}])
def test_a_steps_line_fits_the_terminal(
    changed: dict[str, float], stream: type[io.StringIO], columns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns or stream is Terminal:  # without it, rich asks the terminal that the tests run in
        monkeypatch.setenv("COLUMNS", str(columns or 80))
    lines = shown([("step", {**METRICS, **changed}, 20_000), ("close",)], stream())
    (line,) = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in lines if "reward" in line]
    assert len(line) <= (columns or 80)
    assert f"{int({**METRICS, **changed}['step'])}/20000" in line


@pytest.mark.stranger("F8")
def test_the_most_telling_parts_of_a_line_stay() -> None:
    whole = step_line(METRICS, 40).plain
    assert step_line(METRICS, 40, len(whole)).plain == whole
    assert step_line(METRICS, 40, 80).plain == (
        " 3/40  reward 0.250±0.43  loss -0.0123  grad 1.23  mismatch 0.0312  6.1 s"
    )
    assert step_line(METRICS, 40, 48).plain == " 3/40  reward 0.250±0.43  loss -0.0123  6.1 s"
    only_times = {name: value for name, value in METRICS.items() if name == "step" or name.startswith("seconds")}
    assert step_line(only_times, 40, 34).plain == " 3/40  6.1 s (generate 3.2)"


@pytest.mark.stranger("F8")
def test_progress_is_a_bar_with_a_percentage_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    calls = [("progress", "evaluating", done, 8) for done in range(9)]
    text = "\n".join(shown([("phase", "starting"), *calls, ("close",)], Terminal()))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert re.search(r"evaluating +\S+ \d of 8 \(\d+ %\)", plain)
    assert max(map(len, re.split(r"[\r\n]", plain))) <= 80


@pytest.mark.stranger("F8")
def test_progress_is_a_line_now_and_then_elsewhere() -> None:
    starts = [("progress", f"{name} is ready", i, 2) for i, name in enumerate(("trainer", "generator"), start=1)]
    evaluation = [("progress", "evaluating", done, 4) for done in range(5)]
    ready = ["[00:00] trainer is ready: 1 of 2 (50 %)", "[00:00] generator is ready: 2 of 2 (100 %)"]
    assert shown([*starts, *evaluation]) == ready
    assert shown([*starts, *evaluation], seconds_between=0) == [
        *ready,
        *(f"[00:00] evaluating: {done} of 4 ({25 * done} %)" for done in range(1, 5)),
    ]


def test_what_is_missing_is_left_out() -> None:
    assert step_line({"step": 1.0}, 9).plain == "1/9"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_shown_as_such(value: float) -> None:
    assert f"grad {value}" in step_line({"step": 1.0, "grad_norm": value}, 9).plain


def test_evaluation_shows_interval_and_size() -> None:
    evaluation = Evaluation(groups=tuple(group(float(i % 2)) for i in range(100)))
    (line,) = shown([("evaluation", "before training", evaluation)])
    assert line == "held-out reward before training: 0.500  95 % interval [0.400, 0.600], 100 problems"


def test_samples_are_indented_and_cut() -> None:
    lines = shown([("samples", [group(1.0), group(0.0, "a\n" + "b" * 1000)])])
    assert lines[:4] == [
        "sample 1, reward 1.00",
        "  prompt      What is",
        "              2+2?",
        "  completion  It is 4.",
    ]
    assert lines[-1].endswith("b ...")
    assert len(lines[-1]) < 700


def test_text_in_brackets_is_not_markup() -> None:
    (_, _, _, completion) = shown([("samples", [group(1.0, "[bold]x[/bold] [1, 2]")])])
    assert completion == "  completion  [bold]x[/bold] [1, 2]"


def test_phase_warning_and_end() -> None:
    lines = shown([("phase", "starting"), ("warn", "a step was skipped"), ("done", "Done.")])
    assert lines == ["[00:00] starting", "warning: a step was skipped", "Done."]


def test_in_a_notebook_lines_go_to_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class ZMQInteractiveShell:
        """What rich takes for a notebook's kernel."""

    monkeypatch.setattr("builtins.get_ipython", ZMQInteractiveShell, raising=False)
    assert rich.console.Console().is_jupyter
    assert shown([("note", "a line")]) == ["a line"]
