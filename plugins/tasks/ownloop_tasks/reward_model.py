"""Rewards by a reward model in the controller's process: any sequence classifier of transformers with one label.

    JudgedEnv(env=..., judge=RewardModel(model="runs/reward/model"))

The recipe `reward_smollm2_cpu` trains one from pairs; published ones load as well.
"""

import asyncio
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from ownloop_tasks.judged import Judgement
from rl.configuration import Positive, configuration
from rl.protocols import Prompt
from rl.rollouts.rendering import Renderer
from rl.system.hf_config import read_config_file
from rl.types import PathOrName

Dtype = Literal["float32", "bfloat16"]


@configuration
class RewardModel:
    """A judge for `ownloop_tasks.judged.JudgedEnv`. The reward is the model's value after the end of the last answer.

    A chat is shown by the reward model's own chat template. It rates one conversation at a time, in a thread.
    """

    model: PathOrName
    """The folder of a model with configuration, weights and tokenizer, such as a run's `model`."""
    device: str = "cpu"
    """Where it computes, such as "cpu" or "cuda:1". A GPU needs room beside what runs on it."""
    dtype: Dtype = "float32"
    time_limit_s: Positive = 180.0
    """Most seconds until a conversation is rated, with those before it."""
    failure_reward: float | None = None
    """See `ownloop_tasks.judged.Judge.failure_reward`."""

    def check(self) -> None:
        """Raises ValueError if the folder does not hold a sequence classifier with one label."""
        if not (Path(self.model) / "config.json").is_file():
            raise ValueError(f"RewardModel.model is {self.model!r}; it must be a folder with a config.json")
        config = read_config_file(Path(self.model))
        architecture = (config.get("architectures") or ["model without architecture"])[0]
        labels = len(config.get("id2label") or ("0", "1"))
        if not architecture.endswith("ForSequenceClassification") or labels != 1:
            raise ValueError(
                f"RewardModel.model is {self.model!r}, {architecture} with {labels} label(s); "
                "it must be a sequence classifier with one label"
            )

    async def rate(self, prompt: Prompt, turns: Sequence[Mapping[str, str]]) -> Judgement:
        """See `ownloop_tasks.judged.AnyJudge`."""
        loaded = _loaded(self)
        async with asyncio.timeout(self.time_limit_s):
            call = asyncio.get_running_loop().run_in_executor(loaded.thread, loaded.value, prompt, turns)
            value, num_tokens = await call
        return Judgement(reward=value, num_prompt_tokens=num_tokens)


class _Loaded:
    """The model in memory. It is read when it first rates."""

    def __init__(self, options: RewardModel) -> None:
        self._options = options
        self.thread = ThreadPoolExecutor(max_workers=1)

    def value(self, prompt: Prompt, turns: Sequence[Mapping[str, str]]) -> tuple[float, int]:
        """The model's value of a conversation that ends with an answer, and the number of tokens that it read."""
        import torch

        *before, answer = turns
        if isinstance(prompt, str):
            shown: Prompt = "".join([prompt, *(turn["content"] for turn in before)])
        else:
            shown = [*prompt, *before]
        tokens = [*self._renderer.encode(shown), *self._renderer.encode_completion(shown, answer["content"])]
        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([tokens], device=self._options.device)).logits
        return float(logits[0, 0]), len(tokens)

    @functools.cached_property
    def _renderer(self) -> Renderer:
        return Renderer(Path(self._options.model))

    @functools.cached_property
    def _model(self) -> Any:
        import torch
        from transformers import AutoModelForSequenceClassification

        dtype = getattr(torch, self._options.dtype)
        model = AutoModelForSequenceClassification.from_pretrained(
            self._options.model, dtype=dtype, trust_remote_code=False
        )
        # The head was trained at the last token. transformers looks for the last that is no padding, and in many models
        # the token of padding is also that of the end.
        for config in (model.config, model.config.get_text_config()):
            config.pad_token_id = None
        return model.to(self._options.device).eval()


@functools.cache
def _loaded(options: RewardModel) -> _Loaded:
    """One copy of each reward model, which all its episodes share."""
    return _Loaded(options)
