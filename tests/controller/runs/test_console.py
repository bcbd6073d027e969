import io
import math

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


def shown(console_calls: list[tuple[object, ...]]) -> list[str]:
    """The lines that a stream which is no terminal gets from these calls."""
    stream = io.StringIO()
    console = Console(stream)
    for name, *arguments in console_calls:
        getattr(console, str(name))(*arguments)
    return stream.getvalue().splitlines()


def test_a_step_is_one_line_with_everything() -> None:
    (line,) = shown([("step", METRICS, 40)])
    assert line == (
        " 3/40  reward 0.250±0.43  loss -0.0123  grad 1.23  lr 2e-05  mismatch 0.0312  tok/s 812/640"
        "  6.1 s (generate 3.2 train 2.5 push 0.0)"
    )


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
