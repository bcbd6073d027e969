"""Single-turn tasks of the reasoning-gym package, by name: https://github.com/open-thought/reasoning-gym."""

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rl.checks import check_known
from rl.envs.hashed_options import Options
from rl.envs.procedural import TextProblem, eval_set, train_stream
from rl.protocols import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGym:
    """One task of reasoning-gym, asked in one turn and scored by the task's own verifier."""

    task: str
    """Name of the task, such as "spell_backward"."""
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The task's own options, by its names."""
    template: str = "{question}"
    """Template of the prompt; `{question}` stands for the problem's text."""
    chat: bool = True
    """Whether the prompt is a user's message in a chat. Otherwise the model continues the text as it is."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer."""

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown task or option, naming the nearest, or a template without `{question}`."""
        if "{question}" not in self.template:
            raise ValueError(f"ReasoningGym.template is {self.template!r}; it must contain {{question}}")
        check_known("ReasoningGym.task", self.task, _tasks())
        options = [f.name for f in fields(_tasks()[self.task][1])]
        for name in self.params:
            check_known(f"an option of {self.task} in ReasoningGym.params", name, options)

    @property
    def name(self) -> str:
        """The task's name."""
        return self.task

    def train_problems(self, seed: int, start: int, count: int) -> list[TextProblem]:
        """See `rl.protocols.Env`."""
        return train_stream(self._problem, seed, start, count)

    def eval_problems(self, count: int) -> list[TextProblem]:
        """See `rl.protocols.Env`."""
        return eval_set(self._problem, count)

    def _problem(self, number: int) -> TextProblem:
        dataset = _dataset(self.task, Options(self.params))
        entry = dataset[number]
        text = self.template.replace("{question}", entry["question"])
        prompt: Prompt = [{"role": "user", "content": text}] if self.chat else text

        def score(completion: str) -> float:
            return float(dataset.score_answer(answer=completion.strip(), entry=entry))

        return TextProblem(
            id=f"{self.task}: {entry['question']}", prompt=prompt, score=score, answer=entry.get("answer")
        )


@functools.cache
def _tasks() -> Mapping[str, tuple[Any, Any]]:
    with warnings.catch_warnings():  # raised by a dependency's source
        warnings.simplefilter("ignore", SyntaxWarning)
        from reasoning_gym.factory import DATASETS
    return DATASETS


@functools.lru_cache(maxsize=8)
def _dataset(task: str, params: Options) -> Any:
    dataset_class, config_class = _tasks()[task]
    # reasoning-gym computes entry i from (seed, i) when asked, so the largest possible data set costs nothing.
    return dataset_class(config_class(seed=0, size=2**31 - 1, **params))
