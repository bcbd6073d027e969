"""Checks of what a server computes of an input: right log-probs, the longest input, and input that makes no sense."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tinker import types

from ownloop_referee.bench import REFUSALS, Bench, Findings, FloatArray, NotApplicableError, of_datum, raw_datum


def logprobs(bench: Bench, found: Findings) -> None:
    """Log-probs of the base model are those of transformers in float64, from the trainer and from a sampler."""
    if bench.settings.model is None:
        raise NotApplicableError("the base model's files are not at hand: --model DIRECTORY")
    sequences = [bench.rng.integers(3, bench.vocab_size, length).tolist() for length in (2, 31, 7, 17)]
    expected = _float64_scores(bench, sequences)
    found.equal("trainer", bench.scores(bench.new(), sequences), expected)
    sampler = bench.get(bench.service.create_sampling_client(base_model=bench.base_model))
    found.equal("sampler", bench.scores(sampler, sequences), expected)


@torch.no_grad()
def _float64_scores(bench: Bench, sequences: Sequence[Sequence[int]]) -> FloatArray:
    """`Bench.scores` as transformers computes them in float64. Norms and rotary angles stay in float32 there."""
    from transformers import AutoModelForCausalLM  # takes seconds

    model: Any = AutoModelForCausalLM.from_pretrained(
        str(bench.settings.model), dtype=torch.float64, trust_remote_code=False
    )
    rows: list[FloatArray] = []
    for ids in (torch.tensor([list(tokens)]) for tokens in sequences):
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        rows.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].numpy())
    return np.concatenate(rows)


def context(bench: Bench, found: Findings) -> None:
    """A sequence that fills the context is computed whole. A longer prompt is an error, and the next call works."""
    if bench.context is None:
        raise NotApplicableError("the server does not say how long its context is: --context TOKENS")
    client, length = bench.fresh(), bench.context
    sampler, tokens = bench.sampler(client), bench.rng.integers(3, bench.vocab_size, length + 9).tolist()
    full, short = [tokens[: length - 1]], [tokens[: min(32, length // 2)]]
    trained, beginning = bench.scores(client, full), bench.scores(client, short)
    found.equal(f"sampler and trainer, {length - 1} tokens", bench.scores(sampler, full), trained)
    found.equal("its beginning alone", trained[: beginning.size], beginning)
    for sequences in (full, [tokens]) if bench.settings.model else ():
        try:  # a trainer may take more than a sampler
            scores = bench.scores(bench.new(), sequences)
        except REFUSALS:
            found.right.append(f"{len(sequences[0])} tokens are refused in training")
        else:
            found.equal(f"trainer and float64, {len(sequences[0])} tokens", scores, _float64_scores(bench, sequences))
    prompt, params = types.ModelInput.from_ints(tokens[: length - 4]), types.SamplingParams(max_tokens=length)
    try:
        (sample,) = bench.get(sampler.sample(prompt, 1, params)).sequences
        found.check(len(sample.tokens) <= 4, f"{len(sample.tokens)} tokens were sampled where there is room for 4")
    except REFUSALS:
        found.right.append("max_tokens beyond the context is refused")
    _refused(bench, found, client, f"{length + 9} tokens in a prompt", lambda: bench.scores(sampler, [tokens]))


def bad_input(bench: Bench, found: Findings) -> None:
    """What makes no sense is an error that comes in time, and the next call works."""
    client = bench.fresh()
    service, tokens, beyond = bench.service, bench.sequences[0], bench.vocab_size + 1000
    sampler = bench.sampler(client)
    good, unknown = of_datum(tokens), "tinker://nobody:train:0/{}/nothing"

    def learn(datum: types.Datum, loss: Any = "cross_entropy") -> Callable[[], Any]:
        return lambda: bench.forward_backward(client, [datum], loss)

    def sample(prompt: list[int], num_samples: int = 1, **params: Any) -> Callable[[], object]:
        given = types.SamplingParams(max_tokens=2, **params)
        return lambda: bench.get(sampler.sample(types.ModelInput.from_ints(prompt), num_samples, given))

    cases: dict[str, Callable[[], object]] = {
        "an unknown loss": learn(good, "no_such_loss"),
        "no target_tokens": learn(types.Datum(model_input=good.model_input, loss_fn_inputs={})),
        "fewer targets than tokens": learn(raw_datum(tokens, tokens[:-2], weights=[1.0] * (len(tokens) - 2))),
        "fewer weights than tokens": learn(of_datum(tokens, weights=[1.0, 1.0])),
        "no advantages for ppo": learn(raw_datum(tokens[:-1], tokens[1:], logprobs=[-1.0] * (len(tokens) - 1)), "ppo"),
        "no tokens at all": learn(raw_datum([], [])),
        "a token beyond the vocabulary": learn(of_datum([*tokens[:3], beyond, *tokens[4:]])),
        "a negative token": learn(of_datum([*tokens[:3], -5, *tokens[4:]])),
        "a target beyond the vocabulary": learn(raw_datum(tokens[:3], [*tokens[1:3], beyond])),
        "a learning rate of NaN": lambda: bench.learn(client, learning_rate=float("nan")),
        "a name with a path": lambda: bench.get(client.save_state("../../outside")),
        "an unknown base model": lambda: bench.new(base_model="no/such-model"),
        "a rank of -1": lambda: bench.new(rank=-1),
        "an unknown state": lambda: bench.get(service.create_training_client_from_state(unknown.format("weights"))),
        "unknown weights of a sampler": lambda: bench.scores(
            bench.get(service.create_sampling_client(unknown.format("sampler_weights")))
        ),
        "a prompt token beyond the vocabulary": sample([*tokens[:3], beyond]),
        "an empty prompt": sample([]),
        "no samples": sample(tokens, num_samples=0),
        "a temperature of -1": sample(tokens, temperature=-1.0),
        "a top_p of 2": sample(tokens, top_p=2.0),
    }
    for what, act in cases.items():
        if not _refused(bench, found, client, what, act):
            client = bench.fresh()
            sampler = bench.sampler(client)


def _refused(bench: Bench, found: Findings, client: object, what: str, act: Callable[[], object]) -> bool:
    """Notes whether a call is an error in time, after which the client's weights are as before; returns whether."""
    fault = "accepted"
    try:
        act()
    except TimeoutError as error:
        fault = str(error)
    except Exception:
        try:
            holds = np.abs(bench.scores(client) - bench.at_start).max() <= found.tolerance
            fault = "" if holds else "the weights are not as before"
        except Exception as error:
            fault = f"the next call fails ({type(error).__name__}: {error!s:.80})"
    (found.wrong if fault else found.right).append(f"{what}: {fault}" if fault else what)
    return not fault
