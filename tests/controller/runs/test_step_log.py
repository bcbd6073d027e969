import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.rollout_source import check_prompts_fit
from controller.runs.step_log import StepLog
from generator.config import GeneratorConfig
from rl.algorithms.metrics import PhaseClock
from rl.envs.procedural import TextProblem
from rl.rollouts.episodes import check_sampled_distribution, group_to_data
from rl.rollouts.evaluation import Evaluation, Measurement
from rl.rollouts.rendering import Renderer
from rl.tiny_models import tiny_llama
from rl.types import ForwardBackwardOutput, Group, OptimStepOutput, SamplingParams
from tests.rl.fakes import WordRenderer, completion, single_turn
from tests.rl.recordings import recorded_rows


def _group(*rewards: float) -> Group:
    rollouts = tuple(single_turn((7, 8, 9), completion("ab"), reward=r) for r in rewards)
    return Group(problem_id="p", prompt="p", rollouts=rollouts)


def _step_log(tmp_path: Path, **options: Any) -> tuple[StepLog, RunFolder, io.StringIO]:
    stream = io.StringIO()
    folder = RunFolder(tmp_path / "run", {})
    return StepLog(folder, Console(stream), 10, **options), folder, stream


def _updates(step: int, skipped: str) -> list[OptimStepOutput]:
    """One for each digit; a 1 is skipped."""
    return [
        OptimStepOutput(
            policy_version=step, learning_rate=1e-3, grad_norm=math.nan if each == "1" else 1.5, skipped=each == "1"
        )
        for each in skipped
    ]


def _step(step_log: StepLog, step: int, *, skipped: str = "0", critic: str = "", **metrics: float) -> None:
    clock = PhaseClock()
    for phase in ("generate", "forward_backward", "optim_step"):
        with clock(phase):
            pass
    batch = group_to_data(_group(1, 0), lambda rewards: rewards - rewards.mean())
    output = ForwardBackwardOutput(
        logprobs=tuple(np.where(d.weights != 0, -1.25, 0).astype(np.float32) for d in batch),
        entropy=None,
        metrics={"loss": 6.0, "num_loss_tokens": 4.0, "clipped_tokens": 1.0, **metrics},
    )
    others = {"critic": _updates(step, critic)} if critic else None
    step_log.step(step, clock, [_group(1, 0)], batch, output, _updates(step, skipped), None, others)


def test_a_step_is_written_and_shown(tmp_path: Path) -> None:
    step_log, folder, stream = _step_log(tmp_path)
    _step(step_log, 1)
    (row,) = folder.metrics()
    assert row["loss"] == 1.5  # per sampled token: two completions of two
    assert row["clipped_tokens"] == 0.25
    assert row["logprob_mismatch_mean"] == 0.25
    assert row["ratio_mean"] == pytest.approx(np.exp(-0.25))
    assert row["reward_mean"] == 0.5
    assert "1/10  reward 0.500" in stream.getvalue()
    folder.flush()
    rollouts = recorded_rows(folder.path)
    assert [r["reward"] for r in rollouts] == [1, 0]
    assert rollouts[0]["turns"][0]["tokens"] == [ord("a"), ord("b")]


@pytest.mark.stranger("2.B5")
def test_skipped_updates_of_every_model_and_minibatch_are_counted(tmp_path: Path) -> None:
    run_log, folder, stream = _step_log(tmp_path)
    for step, (policy, critic) in enumerate([("010", "000"), ("000", "111"), ("000", "000")], start=1):
        _step(run_log, step, skipped=policy, critic=critic)
        assert run_log.skipped_in_a_row == (step if step < 3 else 0)
    rows = folder.metrics()
    assert [row["skipped"] for row in rows] == [1, 0, 0]
    assert [row["critic_skipped"] for row in rows] == [0, 3, 0]
    assert [math.isnan(row["grad_norm"]) for row in rows] == [True, False, False]
    assert [math.isnan(row["critic_grad_norm"]) for row in rows] == [False, True, False]
    shown = stream.getvalue()
    assert "step 1: 1 of 3 updates of the policy were skipped: the gradient norm is nan" in shown
    assert "step 2: 3 of 3 updates of the critic were skipped: the gradient norm is nan" in shown


def test_a_batch_of_which_nothing_is_scored_is_written(tmp_path: Path) -> None:
    step_log, folder, _ = _step_log(tmp_path)
    clock = PhaseClock()
    for phase in ("forward_backward", "optim_step"):
        with clock(phase):
            pass
    (datum, _) = group_to_data(_group(1, 0), lambda rewards: rewards - rewards.mean())
    silent = replace(datum, loss_inputs={**datum.loss_inputs, "weights": np.zeros(len(datum.tokens), np.float32)})
    output = ForwardBackwardOutput(
        logprobs=(np.zeros(len(datum.tokens), np.float32),),
        entropy=None,
        metrics={"loss": 0.0, "num_loss_tokens": 0.0},
    )
    update = OptimStepOutput(policy_version=1, learning_rate=1e-3, grad_norm=0.0, skipped=False)
    step_log.step(1, clock, (), [silent], output, [update])
    (row,) = folder.metrics()
    assert (row["loss"], row["grad_norm"]) == (0.0, 0.0)


def test_every_metric_of_a_loss_is_written(tmp_path: Path) -> None:
    step_log, folder, _ = _step_log(tmp_path)
    mine: dict[str, Any] = {"ignored": 3.0, "pull_sum": 3.0, "gap_max": 3.0, "gap_min": -3.0, "ratio_max": 2.0}
    _step(step_log, 1, **mine, memory_peak_bytes_max=1e9, seconds_engine_max=0.5)
    (row,) = folder.metrics()
    assert row["ignored"] == 0.75  # of four scored tokens
    assert {name: row[name] for name in mine if name != "ignored"} == {n: v for n, v in mine.items() if n != "ignored"}
    assert row["seconds_engine_max"] == 0.5
    assert "memory_peak_bytes_max" not in row
    assert row["loss"] == 1.5


@pytest.mark.parametrize(("flops", "peak", "reported"), [(3.0, 4.0, 0.75), (0.0, 4.0, None), (3.0, 0.0, None)])
def test_mfu_is_reported_where_operations_and_rate_are_known(
    tmp_path: Path, flops: float, peak: float, reported: float | None
) -> None:
    step_log, folder, _ = _step_log(tmp_path)
    _step(step_log, 1, model_flops=flops, peak_flops=peak)
    (row,) = folder.metrics()
    assert row.get("mfu") == reported
    assert row.keys().isdisjoint({"model_flops", "peak_flops"})


def test_the_last_sentence_compares_first_and_last(tmp_path: Path) -> None:
    step_log, folder, stream = _step_log(tmp_path)
    step_log.evaluation(0, Evaluation(groups=tuple(_group(float(i < 2)) for i in range(10))))
    _step(step_log, 1)
    step_log.evaluation(10, Evaluation(groups=tuple(_group(float(i < 9)) for i in range(10))))
    step_log.finish()
    text = stream.getvalue()
    assert "held-out reward before training: 0.200" in text
    assert "held-out reward after 10 steps: 0.900" in text
    assert "Held-out reward went from 0.200 to 0.900 (change +0.700" in text
    assert text.rstrip().endswith(f"everything is in {folder.path}.")


def test_further_held_out_sets_are_measured_beside_the_first(tmp_path: Path) -> None:
    step_log, folder, stream = _step_log(tmp_path)
    step_log.evaluation(
        4, Evaluation(groups=(_group(1), _group(0)), others={"aime": Evaluation(groups=(_group(1, 0),))})
    )
    (row,) = folder.metrics()
    assert (row["eval_reward"], row["eval_aime_reward"], row["eval_aime_pass_at_2"]) == (0.5, 0.5, 1.0)
    assert "held-out aime reward after 4 steps: 0.500" in stream.getvalue()
    folder.flush()
    assert [row["split"] for row in recorded_rows(folder.path)] == ["eval", "eval", "eval_aime", "eval_aime"]


@pytest.mark.stranger("2.F1")
def test_frames_of_a_failure_are_shown_once(tmp_path: Path) -> None:
    step_log, _, stream = _step_log(tmp_path)
    failed = Group(problem_id="p", prompt="p", rollouts=(), failures=("p: it broke\n  mine.py, line 7, in score",))
    for step in (1, 2):
        step_log.evaluation(step, Evaluation(groups=(_group(1), failed)))
    assert stream.getvalue().count("1 of 2 rollouts: p: it broke\n") == 2
    assert stream.getvalue().count("mine.py, line 7, in score") == 1


@pytest.mark.stranger("2.F2")
@pytest.mark.parametrize("name", ["", "aime"])
def test_a_first_evaluation_that_fails_wholly_ends_the_run(tmp_path: Path, name: str) -> None:
    failed = Evaluation(groups=(Group(problem_id="p", prompt="p", rollouts=(), failures=("p: it broke",)),) * 2)
    good = Evaluation(groups=(_group(0),))
    given = failed if not name else replace(good, others={name: failed})
    step_log, folder, _ = _step_log(tmp_path)
    with pytest.raises(ValueError, match=r"every rollout of the first evaluation failed.* p: it broke"):
        step_log.evaluation(0, given)
    assert len(folder.metrics()) == 1
    step_log, _, _ = _step_log(tmp_path / "later")
    for evaluation in (good, given):  # later on, it may be an outage
        step_log.evaluation(0, evaluation)


def test_the_last_sentence_of_a_resumed_run_says_since_when(tmp_path: Path) -> None:
    step_log, _, stream = _step_log(tmp_path)
    for step, right in ((4, 3), (8, 9)):
        step_log.evaluation(step, Evaluation(groups=tuple(_group(float(i < right)) for i in range(10))))
    step_log.finish()
    assert "Since step 4, held-out reward went from 0.300 to 0.900 (change +0.600" in stream.getvalue()


@pytest.mark.stranger("2.C6")
def test_what_was_measured_once_is_compared_with_nothing(tmp_path: Path) -> None:
    step_log, _, stream = _step_log(tmp_path)
    step_log.evaluation(8, Evaluation(groups=tuple(_group(float(i < 3)) for i in range(10))))
    loss = Measurement(values=np.array([1.0, 3.0]), weights=np.ones(2))
    step_log.evaluation(8, Evaluation(measurements={"loss": loss}))
    step_log.finish()
    last = stream.getvalue().rstrip().splitlines()[-1]
    assert last.startswith("Held-out loss is 2.000 (95 % interval [")
    assert "; reward is 0.300 (95 % interval [" in last
    assert "change" not in last


def test_a_step_without_signal_is_said(tmp_path: Path) -> None:
    step_log, folder, stream = _step_log(tmp_path)
    step_log.step_without_signal(3, PhaseClock(), [_group(1, 1)])
    assert "step 3 made no update: in every group all rewards were equal" in stream.getvalue()
    assert folder.metrics()[0]["groups_with_signal"] == 0


def test_a_prompt_that_leaves_no_room_is_named() -> None:
    problems = [TextProblem(id=f"{n} words", prompt="x " * n, score=len) for n in (3, 30)]
    renderer: Any = WordRenderer()
    generator = GeneratorConfig(max_model_len=32)
    check_prompts_fit(cast(Renderer, renderer), problems, generator, SamplingParams(max_tokens=2))
    with pytest.raises(
        ValueError, match=r"'30 words' has 30 tokens; with max_tokens 3 .* 32 tokens .* has room for 29"
    ):
        check_prompts_fit(cast(Renderer, renderer), problems, generator, SamplingParams(max_tokens=3))


@pytest.mark.stranger("C3")
@pytest.mark.parametrize("template", [None, "{{ messages[0].content | upper }}", "{{ raise_exception('no') }}", "{% x"])
@pytest.mark.parametrize("prompt", [[{"role": "user", "content": "\ud800"}], [{}], [], [7], None, 7])
def test_a_prompt_that_cannot_be_rendered_is_named(tmp_path: Path, prompt: Any, template: str | None) -> None:
    model = tiny_llama(tmp_path)
    if template:
        (model / "chat_template.jinja").write_text(template)
    problem = TextProblem(id="odd", prompt=prompt, score=len)
    with pytest.raises(ValueError, match="the prompt of problem 'odd' cannot be rendered: "):
        check_prompts_fit(Renderer(model), [problem], GeneratorConfig(max_model_len=32), SamplingParams(max_tokens=2))


def test_rollouts_that_are_not_sampled_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sampling\.temperature is 0\.0; training rollouts need"):
        check_sampled_distribution(SamplingParams(max_tokens=4, temperature=0.0))
    check_sampled_distribution(SamplingParams(max_tokens=4, temperature=0.7, top_p=0.9))
