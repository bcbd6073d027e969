"""Checks of weights that are kept: samplers, saved states, and what several clients see of each other."""

import subprocess
from typing import Any

import numpy as np
from tinker import types

from ownloop_referee.bench import REFUSALS, Bench, Findings, NotApplicableError, of_datum


def samplers(bench: Bench, found: Findings) -> None:
    """A sampling client has the weights of its time, and keeps them while training continues."""
    client, kept = bench.fresh(), list[tuple[str, object, Any]]()
    for number in range(1, 4):
        trained = bench.scores(client)
        made = bench.sampler(client)
        found.equal(f"sampler {number} and trainer", bench.scores(made), trained)
        kept.append((f"sampler {number}", made, bench.scores(made)))
        path = bench.get(client.save_weights_for_sampler(bench.name())).path
        kept.append((f"sampler {number} of a path", bench.get(bench.service.create_sampling_client(path)), trained))
        bench.learn(client, 5.0)
    for what, made, scores in kept:
        found.equal(f"{what}, later", bench.scores(made), scores)


def sampling(bench: Bench, found: Findings) -> None:
    """A sample has the trainer's log-probs and ends with a stop token; a prompt has one log-prob for each token."""
    client, prompt, stop = bench.fresh(), bench.sequences[0][:6], list[int]()
    sampler, model_input = bench.sampler(client), types.ModelInput.from_ints(prompt)
    for size, reason in ((6, "length"), (1, "stop")):
        params = types.SamplingParams(max_tokens=6, seed=5, stop=stop)
        (sample,) = bench.get(sampler.sample(model_input, 1, params)).sequences
        found.check((len(sample.tokens), sample.stop_reason) == (size, reason), f"{reason} after {size}")
        scored = bench.scores(client, [[*prompt, *sample.tokens]])[-len(sample.tokens) :]
        found.equal("sampler and trainer", np.array(sample.logprobs, np.float64), scored)
        stop = list(sample.tokens)[:1]  # the same seed gives it again
    given = list(bench.get(sampler.compute_logprobs(model_input)))
    found.check(len(given) == 6 and given[0] is None, f"{len(given)} log-probs of 6 prompt tokens, the first None")


def resume(bench: Bench, found: Findings) -> None:
    """Training that goes on from a saved state in another session equals training that was never interrupted."""
    usual = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-3}

    def train(client: Any) -> None:  # the first step moves by the moments of earlier ones alone
        bench.learn(client, weight=0.0, **usual)
        bench.learn(client, **{**usual, "learning_rate": 3e-3})

    client = bench.fresh()
    bench.learn(client, **usual)
    path, saved = bench.get(client.save_state(bench.name())).path, bench.scores(client)
    train(client)
    expected = bench.scores(client)
    if bench.settings.restart is not None:
        bench.sessions.pop_all()  # they end with the server
        subprocess.run(bench.settings.restart, shell=True, check=True)
        found.right.append("the server was restarted")
    service = bench.service = bench.connect(bench.settings.key)
    again = bench.get(service.create_training_client_from_state_with_optimizer(path))
    found.equal("as saved", bench.scores(again), saved)
    train(again)
    found.equal("two steps later", bench.scores(again), expected)
    anew = bench.get(service.create_training_client_from_state(path))
    found.equal("weights alone, as saved", bench.scores(anew), saved)
    bench.learn(anew, weight=0.0, **usual)
    found.equal("weights alone, after a gradient of 0", bench.scores(anew), saved)


def two_writers(bench: Bench, found: Findings) -> None:
    """Of two processes that write to one model, neither gets the other's results, and none waits for ever."""
    first, service = bench.fresh(), bench.connect(bench.settings.key)
    second = bench.second_writer(first, service)
    for name, writer, data in (
        ("first", first, [of_datum(bench.sequences[1])]),
        ("second", second, [of_datum(bench.sequences[0])] * 2),
    ) * 3:
        try:
            output = bench.get(writer.forward_backward(data, "cross_entropy"))
        except REFUSALS as error:
            found.right.append(f"the {name} writer reads {error!s:.60}")
            continue
        found.check(len(output.loss_fn_outputs) == len(data), f"the {name} writer has its own result")


def isolation(bench: Bench, found: Findings) -> None:
    """Clients that take turns, in sessions of their own, train as if each were alone."""
    one, two = bench.fresh(), bench.fresh(bench.connect(bench.settings.key))
    others = [of_datum(tokens[::-1]) for tokens in bench.sequences]
    for client, data in ((one, bench.batch()), (two, others), (two, others)):
        bench.forward_backward(client, data)
    bench.step(two)
    bench.step(one)
    alone_one, alone_two = bench.fresh(), bench.fresh()
    bench.learn(alone_one)
    bench.forward_backward(alone_two, [*others, *others])
    bench.step(alone_two)
    found.equal("one, as if alone", bench.scores(one), bench.scores(alone_one))
    found.equal("the other, as if alone", bench.scores(two), bench.scores(alone_two))


def users(bench: Bench, found: Findings) -> None:
    """A user with another key can neither list, load, sample from nor train what is not theirs."""
    if bench.settings.other_key is None:
        raise NotApplicableError("it needs two users: --other-key KEY")
    client, other = bench.fresh(), bench.connect(bench.settings.other_key)
    state = bench.get(client.save_state(bench.name())).path
    weights = bench.get(client.save_weights_for_sampler(bench.name())).path
    stranger = bench.second_writer(client, other)
    for what, act in (
        ("load a state", lambda: other.create_training_client_from_state(state)),
        ("sample", lambda: bench.scores(bench.get(other.create_sampling_client(weights)))),
        ("train", lambda: stranger.forward_backward(bench.batch(), "cross_entropy")),
        ("save", lambda: stranger.save_state(bench.name())),
    ):
        try:
            bench.get(act())
        except REFUSALS:
            found.right.append(f"cannot {what}")
        else:
            found.wrong.append(f"can {what} what is another's")
    listed = {run.training_run_id for run in bench.get(other.create_rest_client().list_training_runs()).training_runs}
    found.check(client.model_id not in listed, "no runs of others are listed")
