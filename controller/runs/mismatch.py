"""`ownloop parity RECIPE`: the same tokens through trainer and generator, and what explains any difference.

Takes what could differ away one after the other: sampling away from the model's own distribution, weights that were
never pulled, packing, the dtype. What the two still disagree on after each tells which of them it was. A last
comparison, after an optimizer step, shows whether what is pulled is what the trainer holds. Nothing is saved.
"""

import asyncio
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from controller.meshes.launch import Launcher
from generator.config import GeneratorConfig
from rl.protocols import Generator, Trainer
from rl.types import AdamParams, Datum, SamplingParams
from trainer.config import TrainerConfig

Logprobs: TypeAlias = NDArray[np.float64]
Tokens: TypeAlias = Sequence[int]

_NUM_PROMPTS = 8
_GROUP_SIZE = 2  # so that a packed row has a prefix to share
_MAX_TOKENS = 32
_NEGLIGIBLE = 1e-4  # what float32 leaves
_NOTABLE = 0.1  # the smallest share of a mismatch that is worth a name
_LEARNING_RATE = 1e-3  # moves log-probs by far more than bfloat16 does
_CAUSES = (
    "sampling away from the model's own distribution (temperature, top_p, top_k)",
    "the generator's weights: before a pull they are not the trainer's",
    "packing: a sequence alone is scored otherwise than in a row with others",
    "the dtype: in float32 both sides agree",
)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far two log-probs of the same tokens are apart, over all sampled tokens."""

    name: str
    mean: float
    """Mean of |p - q|."""
    max: float
    mean_exp: float
    """Mean of exp(p - q), the importance ratio: 1 unless one side is off one way."""


@dataclass(frozen=True, slots=True)
class ParityReport:
    """What `measure_parity` found."""

    mismatches: tuple[Mismatch, ...]
    """Trainer against generator: as configured, then with one difference less in each."""
    stepped: Mismatch
    """The same after an optimizer step, pushed and pulled."""
    sides: tuple[Mismatch, ...]
    """Each side against itself, by what was taken away."""
    num_tokens: int
    explanation: str

    @property
    def worst(self) -> float:
        """The larger of the two mean mismatches that a run would have: as configured, and after a step."""
        return max(self.mismatches[0].mean, self.stepped.mean)

    def table(self) -> str:
        """For the terminal."""
        rows = [*self.mismatches, self.stepped, *self.sides]
        head = f"log-probs of {self.num_tokens} tokens"
        width = max(len(head), *(len(row.name) for row in rows))
        lines = [f"{head:<{width}}  mean |mismatch|   max |mismatch|  mean exp"]
        lines += [f"{row.name:<{width}}  {row.mean:10.2e}  {row.max:10.2e}  {row.mean_exp:8.5f}" for row in rows]
        return "\n".join([*lines, self.explanation])


async def recipe_parity(config: Any) -> ParityReport:
    """Parity for the model, trainer, generator, sampling and environment of a loop's configuration.

    Raises ValueError if the recipe has no trainer or no generator, and as `measure_parity` does.
    """
    missing = [name for name in ("model", "trainer", "generator", "sampling", "env") if not hasattr(config, name)]
    if missing:
        raise ValueError(f"a {type(config).__name__} has no {', '.join(missing)}: there are not two sides to compare")
    from controller.runs.models import resolve_model
    from rl.rollouts.rendering import Renderer

    model = resolve_model(config.model)
    renderer = Renderer(model)
    prompts = [renderer.encode(problem.prompt) for problem in config.env.eval_problems(_NUM_PROMPTS)]
    with tempfile.TemporaryDirectory(prefix="ownloop-parity-") as logs:
        return await measure_parity(
            (model, model), config.trainer, config.generator, prompts, config.sampling, Path(logs)
        )


async def measure_parity(
    models: tuple[Path, Path],
    trainer: TrainerConfig,
    generator: GeneratorConfig,
    prompts: Sequence[Tokens],
    sampling: SamplingParams,
    log_dir: Path,
) -> ParityReport:
    """Starts the two, samples answers to the prompts and compares. `models` are the trainer's and the generator's.

    Raises ValueError for a prompt that leaves no room in the context, and what starting the two raises.
    """
    room = generator.max_model_len - max(map(len, prompts)) - 1  # scoring an answer samples one more token
    if room < 1:
        raise ValueError(f"a prompt of {max(map(len, prompts))} tokens leaves max_model_len no room for an answer")
    sampling = replace(sampling, max_tokens=min(sampling.max_tokens, _MAX_TOKENS, room))
    async with Launcher(log_dir) as launcher:
        found = await compare(*await _start(launcher, models, trainer, generator), prompts, sampling)
    mismatches, sides = list(found.mismatches), list(found.sides)
    if (trainer.compute_dtype, generator.dtype) != ("float32", "float32"):
        in_float32 = replace(trainer, compute_dtype="float32"), replace(generator, dtype="float32")
        async with Launcher(log_dir / "float32") as launcher:
            train, generate = await _start(launcher, models, *in_float32)
            await generate.pull_model_state_dict(await train.push_model_state_dict())
            exact_p = await _score(train, found.sequences, one_by_one=True)
            exact_q = await _rescore(generate, found.sequences)
        mismatches.append(_mismatch("- and float32 on both sides", exact_p, exact_q))
        sides.append(_mismatch(f"trainer: float32, not {trainer.compute_dtype}", exact_p, found.single))
        sides.append(_mismatch(f"generator: float32, not {generator.dtype}", exact_q, found.pulled))
    explanation = " ".join(
        [*compare_tokenizers(*models), explain([mismatch.mean for mismatch in mismatches], found.stepped.mean)]
    )
    return ParityReport(tuple(mismatches), found.stepped, tuple(sides), len(found.single), explanation)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found, and the tokens that it compared on."""

    mismatches: tuple[Mismatch, ...]
    stepped: Mismatch
    sides: tuple[Mismatch, ...]
    sequences: tuple[tuple[Tokens, Tokens], ...]
    """Prompt and completion."""
    single: Logprobs
    """The trainer's log-probs of all completions, each scored alone."""
    pulled: Logprobs
    """The generator's of the same, under the trainer's weights, at temperature 1."""


async def compare(
    train: Trainer, generate: Generator, prompts: Sequence[Tokens], sampling: SamplingParams
) -> Comparison:
    """Everything but the dtype, of a trainer and a generator that run. Takes one optimizer step, pushed and pulled."""
    sampling = replace(sampling, stop=(), seed=0)
    groups = await asyncio.gather(*(generate.generate(p, sampling, _GROUP_SIZE) for p in prompts))
    sequences = tuple((p, sample.tokens) for p, group in zip(prompts, groups, strict=True) for sample in group)
    sampled = np.concatenate([sample.logprobs for group in groups for sample in group])
    packed, single = await _score(train, sequences), await _score(train, sequences, one_by_one=True)
    loaded = await _rescore(generate, sequences)
    await generate.pull_model_state_dict(await train.push_model_state_dict())
    pulled = await _rescore(generate, sequences)

    await train.forward_backward([_datum(*sequence) for sequence in sequences], "cross_entropy")
    await train.optim_step(AdamParams(learning_rate=_LEARNING_RATE), grad_scale=1 / len(sampled))
    await generate.pull_model_state_dict(await train.push_model_state_dict())
    stepped = _mismatch("after an optimizer step", await _score(train, sequences), await _rescore(generate, sequences))
    mismatches = (
        _mismatch("as configured", packed, sampled),
        _mismatch("- at temperature 1, uncut", packed, loaded),
        _mismatch("- and after a pull", packed, pulled),
        _mismatch("- and one sequence per row", single, pulled),
    )
    sides = (
        _mismatch("generator: scored, not sampled", loaded, sampled),
        _mismatch("generator: after a pull, not before", pulled, loaded),
        _mismatch("trainer: one sequence per row", single, packed),
    )
    return Comparison(mismatches, stepped, sides, sequences, single, pulled)


def explain(means: Sequence[float], stepped: float) -> str:
    """One sentence: which of the differences, taken away in this order, closed how much of the mismatch."""
    first, last = means[0], means[-1]
    if stepped > max(2 * means[2], _NEGLIGIBLE):
        return f"After an optimizer step the mismatch is {stepped:.2e}: the pulled weights are not the trainer's."
    if first <= _NEGLIGIBLE:
        return f"There is no mismatch to explain: {first:.2e} is what float32 leaves."
    shares = [(before - after) / first for before, after in itertools.pairwise(means)]
    named = [index for index in np.argsort(shares)[::-1].tolist() if shares[index] >= _NOTABLE]
    if not named:
        return f"None of these explains the mismatch of {first:.2e}; {last:.2e} of it stays."
    parts = "; ".join(f"{shares[index]:.0%} by {_CAUSES[index]}" for index in named)
    rest = f"; {last / first:.0%} by none of these" if last > max(_NOTABLE * first, _NEGLIGIBLE) else ""
    return f"The mismatch of {first:.2e} is explained, {parts}{rest}."


async def _start(
    launcher: Launcher, models: tuple[Path, Path], trainer: TrainerConfig, generator: GeneratorConfig
) -> tuple[Trainer, Generator]:
    return await asyncio.gather(
        launcher.trainer(models[0], trainer, generator=generator), launcher.generator(models[1], generator)
    )


def _datum(prompt: Tokens, completion: Tokens) -> Datum:
    """Scored on the completion alone."""
    tokens = np.array([*prompt, *completion], dtype=np.int64)
    weights = np.zeros(len(tokens) - 1, dtype=np.float32)
    weights[len(prompt) - 1 :] = 1
    return Datum(tokens=tokens[:-1], loss_inputs={"target_tokens": tokens[1:], "weights": weights})


async def _score(trainer: Trainer, sequences: Sequence[tuple[Tokens, Tokens]], *, one_by_one: bool = False) -> Logprobs:
    """The trainer's log-probs of every completion's tokens, end to end."""
    batch = [_datum(*sequence) for sequence in sequences]
    calls = [[datum] for datum in batch] if one_by_one else [batch]
    scored = [logprobs for call in calls for logprobs in (await trainer.forward(call)).logprobs]
    return np.concatenate(
        [logprobs[datum.weights > 0].astype(np.float64) for logprobs, datum in zip(scored, batch, strict=True)]
    )


async def _rescore(generator: Generator, sequences: Sequence[tuple[Tokens, Tokens]]) -> Logprobs:
    """The generator's own log-probs, at temperature 1, of the same tokens."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=True)
    groups = await asyncio.gather(*(generator.generate([*prompt, *answer], sampling) for prompt, answer in sequences))
    scored: list[Logprobs] = []
    for (prompt, _), (completion,) in zip(sequences, groups, strict=True):
        assert completion.prompt_logprobs is not None
        scored.append(np.array(completion.prompt_logprobs[len(prompt) - 1 :]))
    return np.concatenate(scored)


def _mismatch(name: str, p: Logprobs, q: Logprobs) -> Mismatch:
    difference = p - q
    return Mismatch(
        name, float(np.abs(difference).mean()), float(np.abs(difference).max()), float(np.exp(difference).mean())
    )


def compare_tokenizers(trainer_model: Path, generator_model: Path) -> list[str]:
    """A sentence if the two directories would read a text differently."""
    from transformers import AutoTokenizer

    vocabularies = [AutoTokenizer.from_pretrained(model).get_vocab() for model in (trainer_model, generator_model)]
    if vocabularies[0] == vocabularies[1]:
        return []
    differing = len({index for _, index in vocabularies[0].items() ^ vocabularies[1].items()})
    return [f"The tokenizers of {trainer_model} and {generator_model} read {differing} tokens differently."]
