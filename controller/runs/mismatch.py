"""The mismatch between trainer and generator: log-probs of the same tokens from both, and the causes of a difference.

Possible causes are removed one after the other: sampling away from the model's own distribution, weights that were
never pulled, packing, an adapter, the dtype. How much the mismatch shrinks at each removal is the contribution of that
cause. A last comparison, after an optimizer step, shows whether the pulled weights are the trainer's. Nothing is
saved.
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

from controller.handles.adapters import BoundGenerator
from controller.hosts.host_groups import Hosts, Tell
from controller.launching.launcher import Launcher
from generator.config import GeneratorConfig, room_to_score
from rl.data.sources import text_to_datum
from rl.losses.shared import MAX_LOG_RATIO
from rl.protocols import Generator, Trainer
from rl.rollouts.tokenizer import load_tokenizer
from rl.sampling import after_prompt
from rl.types import AdamParams, Completion, Datum, SamplingParams
from trainer.config import TrainerConfig

Logprobs: TypeAlias = NDArray[np.float64]
Tokens: TypeAlias = Sequence[int]

_NUM_PROMPTS = 8
_GROUP_SIZE = 2  # at least 2, so that a packed row has a prefix to share
_MAX_TOKENS = 32
_NEGLIGIBLE = 1e-4  # the size of float32's rounding
_NOTABLE = 0.1  # the smallest part of a mismatch for which a cause is named
_LEARNING_RATE = 1e-3  # moves log-probs by far more than the rounding of bfloat16
_ADAPTER_LEARNING_RATE = 1e-2
_CAUSES = (
    "sampling away from the model's own distribution (temperature, top_p, top_k)",
    "the generator's weights: before a pull they are not the trainer's",
    "packing: a sequence is scored differently when other sequences share its row",
    "the dtype: in float32 both sides agree",
)
_ADAPTER_CAUSE = "the adapter: over the frozen model alone both sides agree"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The difference between two log-probs of the same tokens, over all sampled tokens."""

    name: str
    mean: float
    """Mean of |p - q|."""
    max: float
    mean_exp: float
    """Mean of exp(p - q), the importance ratio. It is 1 unless one side is biased."""


@dataclass(frozen=True, slots=True)
class Parity:
    """The result of `measure_parity`."""

    mismatches: tuple[Mismatch, ...]
    """Trainer against generator: as configured, then with one more cause removed in each."""
    stepped: Mismatch
    """The same after an optimizer step, pushed and pulled."""
    sides: tuple[Mismatch, ...]
    """Each side against itself, with and without each cause."""
    num_tokens: int
    explanation: str

    @property
    def worst(self) -> float:
        """The larger of the mean mismatches that a run would have: as configured, and after an optimizer step."""
        return max(self.mismatches[0].mean, self.stepped.mean)

    def table(self) -> str:
        """The result as a table for the terminal, with the explanation as its last line."""
        rows = [*self.mismatches, self.stepped, *self.sides]
        head = f"log-probs of {self.num_tokens} tokens"
        width = max(len(head), *(len(row.name) for row in rows))
        lines = [f"{head:<{width}}  mean |mismatch|   max |mismatch|  mean exp"]
        lines += [f"{row.name:<{width}}  {row.mean:10.2e}  {row.max:10.2e}  {row.mean_exp:8.5f}" for row in rows]
        return "\n".join([*lines, self.explanation])


async def recipe_parity(config: Any, tell: Tell) -> Parity:
    """Measures parity with the model, trainer, generator, sampling and environment of a loop's configuration.

    `tell` hears what takes long. Raises ValueError if the recipe has no trainer or no generator, and as
    `measure_parity` does.
    """
    missing = [name for name in ("model", "trainer", "generator", "sampling", "env") if not hasattr(config, name)]
    if missing:
        raise ValueError(f"a {type(config).__name__} has no {', '.join(missing)}: there are not two sides to compare")
    from controller.hosts.host_groups import kept_allocations
    from controller.runs.models import resolve_model
    from rl.rollouts.rendering import Renderer

    model = resolve_model(config.model, tell)
    renderer = Renderer(model)
    prompts = [renderer.encode_problem(problem) for problem in config.env.eval_problems(_NUM_PROMPTS)]
    hosts = getattr(config, "hosts", None)
    with tempfile.TemporaryDirectory(prefix="ownloop-parity-") as logs:
        async with kept_allocations(tell):
            return await measure_parity(
                (model, model), config.trainer, config.generator, prompts, config.sampling, Path(logs), hosts
            )


async def measure_parity(
    models: tuple[Path, Path],
    trainer: TrainerConfig,
    generator: GeneratorConfig,
    prompts: Sequence[Tokens],
    sampling: SamplingParams,
    log_dir: Path,
    hosts: Hosts | None = None,
) -> Parity:
    """Starts trainer and generator, samples answers to the prompts and compares.

    `models` are the directories of the trainer's and the generator's model, `hosts` where they run. Raises ValueError
    for a prompt that leaves no room in the context, and what trainer and generator raise as they start.
    """
    # The generator scores an answer by sampling one more token, for which most contexts have room of their own.
    room = generator.max_model_len - max(map(len, prompts)) - 1 + room_to_score(replace(generator, model=models[1]))
    if room < 1:
        raise ValueError(f"a prompt of {max(map(len, prompts))} tokens leaves max_model_len no room for an answer")
    sampling = replace(sampling, max_tokens=min(sampling.max_tokens, _MAX_TOKENS, room))
    async with Launcher(log_dir, hosts) as launcher:
        running = await _start(launcher, models, trainer, generator)
        found = await compare(running.train, running.generate, prompts, sampling, running.frozen)
    mismatches, sides = list(found.mismatches), list(found.sides)
    if (trainer.compute_dtype, generator.dtype) != ("float32", "float32"):
        in_float32 = replace(trainer, compute_dtype="float32"), replace(generator, dtype="float32")
        async with Launcher(log_dir / "float32", hosts) as launcher:
            running = await _start(launcher, models, *in_float32)
            if running.frozen is None:
                await running.generate.pull_model_state_dict(await running.train.push_model_state_dict())
            train, generate = running.frozen or (running.train, running.generate)
            exact_p = await _score(train, found.sequences, one_by_one=True)
            exact_q = await _rescore(generate, found.sequences)
        mismatches.append(_mismatch("- and float32 on both sides", exact_p, exact_q))
        sides.append(_mismatch(f"trainer: float32, not {trainer.compute_dtype}", exact_p, found.single))
        sides.append(_mismatch(f"generator: float32, not {generator.dtype}", exact_q, found.pulled))
    means = [mismatch.mean for mismatch in mismatches]
    explanation = " ".join(
        [*compare_tokenizers(*models), explain(means, found.stepped.mean, adapter=trainer.lora is not None)]
    )
    return Parity(tuple(mismatches), found.stepped, tuple(sides), len(found.single), explanation)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `compare`, and the tokens that it used."""

    mismatches: tuple[Mismatch, ...]
    stepped: Mismatch
    sides: tuple[Mismatch, ...]
    sequences: tuple[tuple[Tokens, Tokens], ...]
    """(prompt, completion) pairs."""
    single: Logprobs
    """The trainer's log-probs of all completions, each scored alone. If there is an adapter, it is left out."""
    pulled: Logprobs
    """The generator's log-probs of the same tokens, with the trainer's weights, at temperature 1, likewise."""


async def compare(
    train: Trainer,
    generate: Generator,
    prompts: Sequence[Tokens],
    sampling: SamplingParams,
    frozen: tuple[Trainer, Generator] | None = None,
) -> Comparison:
    """Compares a running trainer and generator in all but the dtype. Does an optimizer step, a push and a pull.

    If an adapter is trained, `frozen` are both sides without it, and it does an optimizer step before all else: a new
    adapter changes nothing, so nothing could be wrong with it.
    """
    sampling = replace(sampling, stop=(), seed=0)
    rate = _LEARNING_RATE if frozen is None else _ADAPTER_LEARNING_RATE
    if frozen is not None:
        await _learn(train, generate, [(prompt[:1], prompt[1:]) for prompt in prompts if len(prompt) > 1], rate)
    groups = await asyncio.gather(*(generate.generate(p, sampling, _GROUP_SIZE) for p in prompts))
    pairs = [(prompt, sample) for prompt, group in zip(prompts, groups, strict=True) for sample in group]
    sequences = tuple((prompt, sample.tokens) for prompt, sample in pairs)
    sampled = np.concatenate([sample.logprobs for _, sample in pairs])
    packed, single = await _score(train, sequences), await _score(train, sequences, one_by_one=True)
    configured, distribution = await _score_as_sampled(train, pairs, packed)
    loaded = await _rescore(generate, sequences)
    await generate.pull_model_state_dict(await train.push_model_state_dict())
    pulled = await _rescore(generate, sequences)
    mismatches = [
        _mismatch("as configured", configured, sampled),
        _mismatch("- at temperature 1, uncut", packed, loaded),
        _mismatch("- and after a pull", packed, pulled),
        _mismatch("- and one sequence per row", single, pulled),
    ]
    sides = (
        _mismatch("generator: scored, not sampled", loaded, sampled),
        _mismatch("generator: after a pull, not before", pulled, loaded),
        _mismatch("trainer: one sequence per row", single, packed),
        *distribution,
    )
    await _learn(train, generate, sequences, rate)
    stepped = _mismatch("after an optimizer step", await _score(train, sequences), await _rescore(generate, sequences))
    if frozen is not None:
        single, pulled = await _score(frozen[0], sequences, one_by_one=True), await _rescore(frozen[1], sequences)
        mismatches.append(_mismatch("- and without the adapter", single, pulled))
    return Comparison(tuple(mismatches), stepped, sides, sequences, single, pulled)


async def _learn(train: Trainer, generate: Generator, sequences: Sequence[tuple[Tokens, Tokens]], rate: float) -> None:
    """An optimizer step towards the completions, pushed and pulled."""
    lesson = [text_to_datum(*sequence, "completion") for sequence in sequences]
    output = await train.forward_backward(lesson, "cross_entropy")
    await train.optim_step(AdamParams(learning_rate=rate), grad_scale=1 / output.metrics["num_loss_tokens"])
    await generate.pull_model_state_dict(await train.push_model_state_dict())


def explain(means: Sequence[float], stepped: float, *, adapter: bool = False) -> str:
    """One sentence that says how much of the mismatch each cause explains.

    `means` are the mean mismatches as configured and after each removal, `stepped` the one after an optimizer step.
    With `adapter`, leaving it out is the last removal but the dtype's.
    """
    causes = (*_CAUSES[:3], *([_ADAPTER_CAUSE] if adapter else []), *_CAUSES[3:])
    first, last = means[0], means[-1]
    if stepped > max(2 * means[2], _NEGLIGIBLE):
        return f"After an optimizer step the mismatch is {stepped:.2e}: the pulled weights are not the trainer's."
    if first <= _NEGLIGIBLE:
        return f"There is no mismatch to explain: {first:.2e} is what float32 leaves."
    shares = [(before - after) / first for before, after in itertools.pairwise(means)]
    named = [index for index in np.argsort(shares)[::-1].tolist() if shares[index] >= _NOTABLE]
    if not named:
        return f"None of these explains the mismatch of {first:.2e}; {last:.2e} of it stays."
    parts = "; ".join(f"{shares[index]:.0%} by {causes[index]}" for index in named)
    rest = f"; {last / first:.0%} by none of these" if last > max(_NOTABLE * first, _NEGLIGIBLE) else ""
    return f"The mismatch of {first:.2e} is explained, {parts}{rest}."


@dataclass(frozen=True, slots=True)
class _Running:
    """Both sides, and both of them without the adapter, if there is one."""

    train: Trainer
    generate: Generator
    frozen: tuple[Trainer, Generator] | None


async def _start(
    launcher: Launcher, models: tuple[Path, Path], trainer: TrainerConfig, generator: GeneratorConfig
) -> _Running:
    train, generate = await asyncio.gather(
        launcher.trainer(models[0], trainer, generator=generator), launcher.generator(models[1], generator)
    )
    if not isinstance(generate, BoundGenerator):
        return _Running(train, generate, None)
    return _Running(train, generate, (await launcher.reference(models[0], trainer), generate.unbound))


async def _score(
    trainer: Trainer,
    sequences: Sequence[tuple[Tokens, Tokens]],
    *,
    one_by_one: bool = False,
) -> Logprobs:
    """The trainer's log-probs of all completions' tokens, at temperature 1, concatenated."""
    batch = [text_to_datum(*sequence, "completion") for sequence in sequences]
    return await _score_data(trainer, [[datum] for datum in batch] if one_by_one else [batch])


async def _score_as_sampled(
    trainer: Trainer, pairs: Sequence[tuple[Tokens, Completion]], plain: Logprobs
) -> tuple[Logprobs, list[Mismatch]]:
    """The trainer's log-probs under the distribution that was sampled from; what temperature and cut do to them.

    `plain` are its log-probs at temperature 1, uncut. Prompts need no kept words, because nothing of them is scored.
    """
    whole = [
        replace(text_to_datum(prompt, sample.tokens, "completion"), temperature=sample.temperature or 1.0)
        for prompt, sample in pairs
    ]
    batch = [
        datum if sample.kept is None else replace(datum, kept=after_prompt(prompt, sample.kept))
        for datum, (prompt, sample) in zip(whole, pairs, strict=True)
    ]
    uncut = await _score_data(trainer, [whole])
    configured = await _score_data(trainer, [batch]) if any(datum.kept for datum in batch) else uncut
    rows = {"trainer: at temperature 1": (plain, uncut), "trainer: of all words, not kept ones": (uncut, configured)}
    return configured, [_mismatch(name, p, q) for name, (p, q) in rows.items() if not np.array_equal(p, q)]


async def _score_data(trainer: Trainer, calls: Sequence[list[Datum]]) -> Logprobs:
    batch = [datum for call in calls for datum in call]
    scored = [logprobs for call in calls for logprobs in (await trainer.forward(call)).logprobs]
    return np.concatenate(
        [logprobs[datum.counted].astype(np.float64) for logprobs, datum in zip(scored, batch, strict=True)]
    )


async def _rescore(generator: Generator, sequences: Sequence[tuple[Tokens, Tokens]]) -> Logprobs:
    """The generator's log-probs of all completions' tokens, at temperature 1, concatenated."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=True)
    groups = await asyncio.gather(*(generator.generate([*prompt, *answer], sampling) for prompt, answer in sequences))
    scored: list[Logprobs] = []
    for (prompt, _), (completion,) in zip(sequences, groups, strict=True):
        assert completion.prompt_logprobs is not None
        scored.append(np.array(completion.prompt_logprobs[len(prompt) - 1 :]))
    return np.concatenate(scored)


def _mismatch(name: str, p: Logprobs, q: Logprobs) -> Mismatch:
    difference = p - q
    ratio = np.exp(np.minimum(difference, MAX_LOG_RATIO))
    return Mismatch(name, float(np.abs(difference).mean()), float(np.abs(difference).max()), float(ratio.mean()))


def compare_tokenizers(trainer_model: Path, generator_model: Path) -> list[str]:
    """One sentence if the tokenizers of the two directories differ, else none."""
    vocabularies = [load_tokenizer(model).get_vocab() for model in (trainer_model, generator_model)]
    if vocabularies[0] == vocabularies[1]:
        return []
    differing = len({index for _, index in vocabularies[0].items() ^ vocabularies[1].items()})
    return [f"The tokenizers of {trainer_model} and {generator_model} read {differing} tokens differently."]
