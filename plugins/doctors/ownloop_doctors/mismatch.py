"""The mismatch between trainer and generator: log-probs of the same tokens from both, and the causes of a difference.

Possible causes are removed one after the other: a mixture's experts, sampling away from the model's own distribution,
weights that were never pulled, packing, an adapter, the output projection's dtype, the dtype. How much the mismatch
shrinks at each removal is the contribution of that cause. A last comparison, after an optimizer step, shows whether the
pulled weights are the trainer's. At some positions all tokens of the vocabulary are compared, not only the sampled one.
Nothing is saved."""

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
from controller.launching.hosts import Hosts, Tell, kept
from controller.launching.launcher import Launcher
from controller.runs.loop_config import options_of
from generator.config import GeneratorConfig, room_to_score
from ownloop_doctors.vocabulary import compare_tokenizers, compare_vocabulary, split_after_images
from rl.data.sources import text_to_datum
from rl.images import images_of, join_tokens
from rl.losses.shared import MAX_LOG_RATIO
from rl.protocols import Generator, Trainer
from rl.sampling import Ids, after_prompt
from rl.system.hf_config import experts_of, read_config
from rl.types import AdamParams, Completion, Datum, SamplingParams
from trainer.config import TrainerConfig
from trainer.engine_table import find_engine

Logprobs: TypeAlias = NDArray[np.float64]
Tokens: TypeAlias = Sequence[int]
_Widening: TypeAlias = tuple[str, dict[str, object], dict[str, object]]
"""What is widened, as options of the trainer and of the generator."""

_NUM_PROMPTS = 8
_GROUP_SIZE = 2  # at least 2, so that a packed row has a prefix to share
_MAX_TOKENS = 32
_NEGLIGIBLE = 1e-4  # the size of float32's rounding
_NOTABLE = 0.1  # the smallest part of a mismatch for which a cause is named, and of a step that was not pulled
_LEARNING_RATE = 1e-3  # moves log-probs by far more than the rounding of bfloat16
_ADAPTER_LEARNING_RATE = 1e-2
CAUSES = (
    "sampling away from the model's own distribution (temperature, top_p, top_k)",
    "the generator's weights: before a pull they are not the trainer's",
    "packing: a sequence is scored differently when other sequences share its row",
)
EXPERTS_CAUSE = "the experts: the trainer's layers choose others, unless routes is 'replay'"
ADAPTER_CAUSE = "the adapter: over the frozen model alone both sides agree"
HEAD_CAUSE = "the output projection: head_dtype 'float32' on both sides widens it"
DTYPE_CAUSE = "the dtype: in float32 both sides agree"
_WIDE_HEAD: _Widening = ("a float32 head", {"head_dtype": "float32"}, {"head_dtype": "float32"})
_WIDE: _Widening = ("float32", {"compute_dtype": "float32"}, {"dtype": "float32"})


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
    """Each side against itself, with and without each cause, and before and after the step."""
    num_tokens: int
    vocabulary: str
    """What the comparison of the whole vocabulary found."""
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
        return "\n".join([*lines, self.vocabulary, self.explanation])


async def recipe_parity(config: Any, tell: Tell) -> Parity:
    """Measures parity as a recipe would train: with its model, trainer, generator, sampling and environment.

    `tell` is called with what takes long. Raises ValueError if the recipe has no trainer or no generator, and as
    `measure_parity` does.
    """
    missing = [name for name in ("model", "trainer", "generator", "sampling", "env") if not hasattr(config, name)]
    if missing:
        raise ValueError(f"a {type(config).__name__} has no {', '.join(missing)}: there are not two sides to compare")
    from controller.runs.models import resolve_model
    from rl.rollouts.rendering import Renderer

    model = resolve_model(config.model, tell)
    renderer = Renderer(model)
    prompts = [renderer.encode_problem(problem) for problem in config.env.eval_problems(_NUM_PROMPTS)]
    hosts = options_of(config).hosts
    with tempfile.TemporaryDirectory(prefix="ownloop-parity-") as logs:
        async with kept(hosts, tell):
            return await measure_parity(
                (model, model),
                config.policy_config,
                config.generator_config,
                prompts,
                config.sampling,
                Path(logs),
                hosts,
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
    replays, generator = generator.routes, _measured(generator, trainer, models[1])
    async with Launcher(log_dir, hosts) as launcher:
        running = await _start(launcher, models, trainer, generator)
        found = await compare(
            running.train, running.generate, prompts, sampling, running.frozen, replays_routes=replays
        )
        whole = join_tokens(*found.sequences[0])
        words = split_after_images(whole)[1] if images_of(whole) else whole
        vocabulary = await compare_vocabulary(running.train, running.generate, words)
    mismatches, sides = list(found.mismatches), list(found.sides)
    one_head = generator.numerics or trainer.head_dtype or "float32" in (trainer.compute_dtype, generator.dtype)
    wider = [] if one_head else [_WIDE_HEAD]
    wider += [] if trainer.compute_dtype == generator.dtype == "float32" else [_WIDE]
    for name, of_trainer, of_generator in wider:
        widened = replace(trainer, **of_trainer), replace(generator, **of_generator)
        async with Launcher(log_dir / name.replace(" ", "-"), hosts) as launcher:
            running = await _start(launcher, models, *widened)
            if running.frozen is None:
                await running.generate.pull_model_state_dict(await running.train.push_model_state_dict())
            p, q = await _alone(*(running.frozen or (running.train, running.generate)), found.sequences)
        mismatches.append(_mismatch(f"- and {name} on both sides", p, q))
        was = (trainer.compute_dtype, generator.dtype)
        sides.append(_mismatch(f"trainer: {name}, not {was[0]}", p, found.single))
        sides.append(_mismatch(f"generator: {name}, not {was[1]}", q, found.pulled))
    causes = [HEAD_CAUSE, DTYPE_CAUSE][-len(wider) :] if wider else []
    sentence = explain([m.mean for m in mismatches], found.stepped.mean, found.step.mean, [*found.causes, *causes])
    explanation = " ".join([*compare_tokenizers(*models), sentence])
    return Parity(tuple(mismatches), found.stepped, (*sides, found.step), len(found.single), vocabulary, explanation)


def _measured(generator: GeneratorConfig, trainer: TrainerConfig, model: Path) -> GeneratorConfig:
    """The generator's configuration with what is measured: the vocabulary, and experts if they can be replayed."""
    replays = find_engine(trainer.engine).replays_routes and not trainer.compile
    routes = replays and experts_of(read_config(model)) is not None
    return replace(generator, routes=routes, engine_args={**generator.engine_args, "max_logprobs": -1})


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `compare`, and the tokens that it used."""

    mismatches: tuple[Mismatch, ...]
    stepped: Mismatch
    step: Mismatch
    """The trainer against itself, before and after the optimizer step: how far the step moved log-probs."""
    sides: tuple[Mismatch, ...]
    sequences: tuple[tuple[Tokens, Tokens], ...]
    """(prompt, completion) pairs."""
    causes: tuple[str, ...]
    """What each removal took away, one fewer than `mismatches`."""
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
    *,
    replays_routes: bool = False,
) -> Comparison:
    """Compares a running trainer and generator in all but the dtype. Does an optimizer step, a push and a pull.

    If an adapter is trained, `frozen` are both sides without it, and it does an optimizer step before all else: a new
    adapter changes nothing, so nothing could be wrong with it. `replays_routes` says whether the run does; if the
    generator returns routes, everything but the first comparison does in any case.
    """
    sampling = replace(sampling, stop=(), seed=0)
    rate = _LEARNING_RATE if frozen is None else _ADAPTER_LEARNING_RATE
    if frozen is not None:
        lesson = map(split_after_images, prompts)
        await _learn(train, generate, [(prompt, rest) for prompt, rest in lesson if rest], rate)
    groups = await asyncio.gather(*(generate.generate(p, sampling, _GROUP_SIZE) for p in prompts))
    pairs = [(prompt, sample) for prompt, group in zip(prompts, groups, strict=True) for sample in group]
    sequences = tuple((prompt, sample.tokens) for prompt, sample in pairs)
    sampled = np.concatenate([sample.logprobs for _, sample in pairs])
    mismatches, causes, distribution = await _compare_as_sampled(train, pairs, sampled, replays_routes)
    loaded, routes = await _rescore(generate, sequences)
    before = await _score(train, sequences, routes)
    await generate.pull_model_state_dict(await train.push_model_state_dict())
    pulled, routes = await _rescore(generate, sequences)
    packed = await _score(train, sequences, routes)
    single = await _score(train, sequences, routes, one_by_one=True)
    mismatches += [
        _mismatch("- at temperature 1, uncut", before, loaded),
        _mismatch("- and after a pull", packed, pulled),
        _mismatch("- and one sequence per row", single, pulled),
    ]
    sides = (
        _mismatch("generator: scored, not sampled", loaded, sampled),
        _mismatch("generator: after a pull, not before", pulled, loaded),
        _mismatch("trainer: one sequence per row", single, packed),
        *distribution,
    )
    stepped, step = await _after_a_step(train, generate, sequences, rate, packed)
    if frozen is not None:
        single, pulled = await _alone(*frozen, sequences)
        mismatches.append(_mismatch("- and without the adapter", single, pulled))
        causes.append(ADAPTER_CAUSE)
    return Comparison(tuple(mismatches), stepped, step, sides, sequences, tuple(causes), single, pulled)


async def _compare_as_sampled(
    train: Trainer, pairs: Sequence[tuple[Tokens, Completion]], sampled: Logprobs, replays_routes: bool
) -> tuple[list[Mismatch], list[str], list[Mismatch]]:
    """The first comparisons: as configured and, if that is another, with the generator's experts.

    Returns them, all causes, and the effects of temperature and cut.
    """
    configured, distribution = await _score_as_sampled(train, pairs, replays_routes=replays_routes)
    mismatches = [_mismatch("as configured", configured, sampled)]
    if replays_routes or any(sample.routes is None for _, sample in pairs):
        return mismatches, [*CAUSES], distribution
    replayed, _ = await _score_as_sampled(train, pairs, replays_routes=True)
    mismatches.append(_mismatch("- with the generator's experts", replayed, sampled))
    return mismatches, [EXPERTS_CAUSE, *CAUSES], distribution


async def _after_a_step(
    train: Trainer, generate: Generator, sequences: Sequence[tuple[Tokens, Tokens]], rate: float, before: Logprobs
) -> tuple[Mismatch, Mismatch]:
    """Trainer against generator after an optimizer step, pushed and pulled, and the trainer against itself `before`."""
    await _learn(train, generate, sequences, rate)
    q, routes = await _rescore(generate, sequences)
    p = await _score(train, sequences, routes)
    return _mismatch("after an optimizer step", p, q), _mismatch("trainer: after the step, not before", p, before)


async def _learn(train: Trainer, generate: Generator, sequences: Sequence[tuple[Tokens, Tokens]], rate: float) -> None:
    """An optimizer step towards the completions, pushed and pulled."""
    lesson = [text_to_datum(*sequence, "completion") for sequence in sequences]
    output = await train.forward_backward(lesson, "cross_entropy")
    await train.optim_step(AdamParams(learning_rate=rate), grad_scale=1 / output.metrics["num_loss_tokens"])
    await generate.pull_model_state_dict(await train.push_model_state_dict())


def explain(means: Sequence[float], stepped: float, step: float, causes: Sequence[str]) -> str:
    """One sentence that says how much of the mismatch each cause explains.

    `means` are the mean mismatches as configured and after the removal of each of `causes`, `stepped` the one after an
    optimizer step, and `step` how far the step moved log-probs. Weights that were not pulled leave a mismatch of that
    size. Rounding grows too as a step makes the model surer, so a small part of the step proves nothing in bfloat16.
    """
    first, last, pulled = means[0], means[-1], means[causes.index(CAUSES[1]) + 1]
    if stepped > max(2 * pulled, _NEGLIGIBLE if pulled <= _NEGLIGIBLE else _NOTABLE * step):
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


async def _alone(
    train: Trainer, generate: Generator, sequences: Sequence[tuple[Tokens, Tokens]]
) -> tuple[Logprobs, Logprobs]:
    """Both sides' log-probs of all completions' tokens, each sequence in a row of its own."""
    q, routes = await _rescore(generate, sequences)
    return await _score(train, sequences, routes, one_by_one=True), q


async def _score(
    trainer: Trainer,
    sequences: Sequence[tuple[Tokens, Tokens]],
    routes: Sequence[Ids | None],
    *,
    one_by_one: bool = False,
) -> Logprobs:
    """The trainer's log-probs of all completions' tokens, at temperature 1, concatenated."""
    batch = [
        replace(text_to_datum(*sequence, "completion"), routes=each)
        for sequence, each in zip(sequences, routes, strict=True)
    ]
    return await _score_data(trainer, [[datum] for datum in batch] if one_by_one else [batch])


async def _score_as_sampled(
    trainer: Trainer, pairs: Sequence[tuple[Tokens, Completion]], *, replays_routes: bool
) -> tuple[Logprobs, list[Mismatch]]:
    """The trainer's log-probs under the distribution that was sampled from; what temperature and cut do to them.

    Prompts need no kept tokens, because nothing of them is scored.
    """
    plain = [text_to_datum(prompt, sample.tokens, "completion") for prompt, sample in pairs]
    if replays_routes:
        each = [np.concatenate([s.routes.prompt, s.routes.sampled]) if s.routes else None for _, s in pairs]
        plain = [replace(datum, routes=routes) for datum, routes in zip(plain, each, strict=True)]
    whole = [replace(d, temperature=s.temperature or 1.0) for d, (_, s) in zip(plain, pairs, strict=True)]
    batch = [
        datum if sample.kept is None else replace(datum, kept=after_prompt(prompt, sample.kept))
        for datum, (prompt, sample) in zip(whole, pairs, strict=True)
    ]
    hot = any(datum.temperature != 1 for datum in whole)
    uncut = await _score_data(trainer, [whole])
    configured = await _score_data(trainer, [batch]) if any(datum.kept for datum in batch) else uncut
    rows = {
        "trainer: at temperature 1": (await _score_data(trainer, [plain]) if hot else uncut, uncut),
        "trainer: of all tokens, not kept ones": (uncut, configured),
    }
    return configured, [_mismatch(name, p, q) for name, (p, q) in rows.items() if not np.array_equal(p, q)]


async def _score_data(trainer: Trainer, calls: Sequence[list[Datum]]) -> Logprobs:
    batch = [datum for call in calls for datum in call]
    scored = [logprobs for call in calls for logprobs in (await trainer.forward(call)).logprobs]
    return np.concatenate(
        [logprobs[datum.counted].astype(np.float64) for logprobs, datum in zip(scored, batch, strict=True)]
    )


async def _rescore(
    generator: Generator, sequences: Sequence[tuple[Tokens, Tokens]]
) -> tuple[Logprobs, list[Ids | None]]:
    """The generator's log-probs of all completions' tokens, at temperature 1, concatenated; its experts, if any."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=True)
    groups = await asyncio.gather(*(generator.generate(join_tokens(*pair), sampling) for pair in sequences))
    scored: list[Logprobs] = []
    routes: list[Ids | None] = []
    for (prompt, _), (completion,) in zip(sequences, groups, strict=True):
        assert completion.prompt_logprobs is not None
        scored.append(np.array(completion.prompt_logprobs[len(prompt) - 1 :]))
        routes.append(None if completion.routes is None else completion.routes.prompt[:-1])
    return np.concatenate(scored), routes


def _mismatch(name: str, p: Logprobs, q: Logprobs) -> Mismatch:
    difference = p - q
    ratio = np.exp(np.minimum(difference, MAX_LOG_RATIO))
    return Mismatch(name, float(np.abs(difference).mean()), float(np.abs(difference).max()), float(ratio.mean()))
