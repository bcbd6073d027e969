"""Rewards by a reward model, against transformers on the conversation's tokens."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from ownloop_tasks.guess_number import GuessNumber
from ownloop_tasks.judged import JudgedEnv
from ownloop_tasks.reward_model import RewardModel
from rl.protocols import Done, Env, Observation, Prompt
from rl.rollouts.guard import call_environment
from rl.rollouts.rendering import Renderer
from rl.tiny_models import tiny_llama
from rl.tiny_tasks import EvenWords
from tests.trainer.engine_trainer import EngineTrainer


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    trainer = EngineTrainer(tiny_llama(folder / "model"), head="value")
    torch.nn.init.normal_(dict(trainer.engine.hf_parameters())["score.weight"])
    asyncio.run(trainer.export_hf(folder / "reward_model"))
    return folder / "reward_model"


async def _play(env: Env, answers: list[str]) -> tuple[Prompt, Done]:
    """The text before the last answer, and the end of the episode."""
    (problem,) = env.train_problems(0, 0, 1)
    prompt, episode = problem.prompt, await call_environment(problem.start, time_limit_s=60)
    for answer in answers[:-1]:
        reply = await call_environment(episode.reply, answer, time_limit_s=60)
        assert isinstance(reply, Observation)
        prompt = f"{prompt}{answer}{reply.messages}"
    done = await call_environment(episode.reply, answers[-1], time_limit_s=60)
    assert isinstance(done, Done)
    return prompt, done


@pytest.mark.parametrize(("env", "answers"), [(EvenWords(), ["w3 w4"]), (GuessNumber(max_turns=2), ["1", "2"])])
def test_the_reward_is_the_value_after_the_answer(reward_model: Path, env: Env, answers: list[str]) -> None:
    prompt, done = asyncio.run(_play(JudgedEnv(env=env, judge=RewardModel(model=str(reward_model))), answers))
    renderer = Renderer(reward_model)
    tokens = [*renderer.encode(prompt), *renderer.encode_completion(prompt, answers[-1])]
    classifier = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    assert done.reward == pytest.approx(classifier(input_ids=torch.tensor([tokens])).logits.item(), rel=1e-5)
    assert done.metrics["judge_prompt_tokens"] == len(tokens)


@pytest.mark.stranger("2.D1")
@pytest.mark.parametrize("padding", [None, 2, 5, 0])  # 2 ends an answer, 5 is within this one
def test_the_value_is_read_at_the_last_token_whatever_pads(reward_model: Path, tmp_path: Path, padding: int) -> None:
    model = tmp_path / "model"
    shutil.copytree(reward_model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "pad_token_id": padding}))
    classifier = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    renderer = Renderer(model)
    for answer in ("w3 w5 w4", "w3 w5", "w4 w2"):
        tokens = torch.tensor([[*renderer.encode("w7 w9"), *renderer.encode_completion("w7 w9", answer)]])
        with torch.inference_mode():
            expected = classifier.score(classifier.model(input_ids=tokens).last_hidden_state[0, -1]).item()
        judged = asyncio.run(RewardModel(model=str(model)).rate("w7 w9", [{"role": "assistant", "content": answer}]))
        assert judged.reward == pytest.approx(expected, abs=1e-5)


def test_a_folder_without_a_reward_model_is_refused(reward_model: Path, tmp_path: Path) -> None:
    for model, message in (
        (tmp_path, "must be a folder with a config.json"),
        (tiny_llama(tmp_path / "model"), "LlamaForCausalLM .* must be a sequence classifier with one label"),
    ):
        with pytest.raises(ValueError, match=message):
            JudgedEnv(env=EvenWords(), judge=RewardModel(model=str(model))).eval_problems(1)
    JudgedEnv(env=EvenWords(), judge=RewardModel(model=str(reward_model))).eval_problems(1)
