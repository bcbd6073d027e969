"""Thirty wrong options of a stranger: each is answered in one or two lines, with the option and what is accepted."""

import sys
from pathlib import Path

import pytest

from controller.commands.command_line import run_command

RUN = "run grpo_smollm2_cpu"
WRONG = (  # what the stranger types, the option or field that is named, and what is said to be accepted
    # names
    ("rnu grpo_smollm2_cpu", "command is 'rnu'", "did you mean 'run'"),
    ("run grpo_smolm2_cpu", "recipe is 'grpo_smolm2_cpu'", "did you mean 'grpo_smollm2_cpu'"),
    (f"{RUN} --num-step 3", "--num-step;", "did you mean '--num-steps'"),
    (f"{RUN} --lr 3", "--lr;", "did you mean '--learning-rate'"),
    (f"{RUN} --lora.rnak 3", "--lora.rnak;", "did you mean '--lora.rank'"),
    (f"{RUN} --zzz 3", "--zzz;", "see --help"),
    (f"{RUN} --trainer 3", "--trainer is no option itself", "--trainer.FIELD"),
    (f"{RUN} --loss pppo", "loss is 'pppo'", "did you mean 'ppo'"),
    (f"{RUN} --advantage group_men", "advantage is 'group_men'", "did you mean 'group_mean'"),
    (f"{RUN} --trainer.engine torchtitn", "TrainerConfig.engine is 'torchtitn'", "did you mean 'torchtitan'"),
    (f"{RUN} --loss-config kl_coff 1", "loss_config has 'kl_coff'", "did you mean 'kl_coef'"),
    ("list --all", "--all;", "see --help"),
    # types
    (f"{RUN} --num-steps x", "--num-steps takes INT", "'x'"),
    (f"{RUN} --num-steps 2.5", "--num-steps takes INT", "'2.5'"),
    (f"{RUN} --sampling.top-p hot", "--sampling.top-p takes FLOAT", "'hot'"),
    (f"{RUN} --num-steps", "--num-steps needs a value", "INT"),
    (f"{RUN} --trainer.compile true", "--trainer.compile takes no value", "'true'"),
    (f"{RUN} --loss-config kl_coef", "--loss-config takes [STR FLOAT|STR", "pairs"),
    (f"{RUN} --loss-config kl_coef high", "loss_config['kl_coef'] is 'high'", "a valid number"),
    (f"{RUN} --optimizer sgd", "--optimizer is 'sgd'", "known: adamw, muon"),
    # ranges
    (f"{RUN} --num-steps 0", "GRPOConfig.num_steps is 0", "greater than 0"),
    (f"{RUN} --learning-rate nan", "GRPOConfig.learning_rate is nan", "a finite number"),
    (f"{RUN} --seed=-1", "GRPOConfig.seed is -1", "greater than or equal to 0"),
    (f"{RUN} --env.count 99", "LargestNumber.count is 99", "less than or equal to 20"),
    (f"{RUN} --sampling.temperature 5", "SamplingParams.temperature is 5.0", "0, or from 0.01 to 2"),
    # paths
    ("run missing.py", "recipe file missing.py", "there is no"),
    (f"{RUN} --replay gone", "recording", "gone"),
    # combinations
    (f"{RUN} --at 3", "--at is for --fork", "from its beginning"),
    (f"{RUN} --evaluation beside --placement colocated", "evaluation is 'beside'", "use evaluation 'between'"),
    (f"{RUN} --trainer.lora.rank 8", "trainer.lora is set", "set `lora`"),
)


@pytest.mark.stranger("F5")
@pytest.mark.parametrize(("words", "named", "accepted"), WRONG, ids=[words for words, *_ in WRONG])
def test_a_wrong_option_is_named_with_what_is_accepted(
    words: str,
    named: str,
    accepted: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert run_command(words.split()) == 2
    error = capfd.readouterr().err
    assert len(error.splitlines()) <= 2
    assert named in error
    assert accepted in error
    assert not list(here.iterdir())
