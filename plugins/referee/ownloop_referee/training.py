"""Checks of training: order, sums, losses and the optimizer. Expected values are NumPy's, or arithmetic on steps."""

from typing import Any

import numpy as np
import torch

from ownloop_referee.bench import REFUSALS, Bench, Findings, FloatArray, of_datum, of_output


def order(bench: Bench, found: Findings) -> None:
    """Calls that nobody waits for run in the order of the script; each forward sees the steps before it alone."""
    eager, patient = bench.fresh(), bench.fresh()
    futures: list[object] = []
    for scale in (1.0, 2.0, 1.0):
        eager.forward_backward(bench.batch(), "cross_entropy")
        eager.optim_step(bench.params(scale))
        futures.append(eager.forward(bench.batch(), "cross_entropy"))
    at_once = [of_output(bench.get(future)) for future in reversed(futures)][::-1]
    for number, (scale, scores) in enumerate(zip((1.0, 2.0, 1.0), at_once, strict=True), 1):
        bench.learn(patient, scale)
        found.equal(f"after step {number}", scores, bench.scores(patient))


def accumulation(bench: Bench, found: Findings) -> None:
    """Gradients of calls of different sizes add up to that of one call, until optim_step, which empties them."""
    lengths = (9, 4, 12, 7, 10, 3, 12, 8)
    data = [of_datum(bench.rng.integers(3, bench.vocab_size, length).tolist()) for length in lengths]

    def in_calls(*sizes: int) -> Any:
        client, ends = bench.fresh(), np.cumsum(sizes)
        for size, end in zip(sizes, ends, strict=True):
            bench.forward_backward(client, data[end - size : end])
        bench.step(client, 2.0)
        return client

    whole = in_calls(8)
    expected = bench.scores(whole)
    for sizes in ((1, 5, 2), (4, 4), (1,) * 8):
        found.equal(f"calls of {sizes}", bench.scores(in_calls(*sizes)), expected)
    bench.learn(whole, weight=0.0)
    found.equal("the next step, of a gradient of 0", bench.scores(whole), expected)


def sums(bench: Bench, found: Findings) -> None:
    """A loss is the sum over the tokens of all datums, with weights of any sign and size."""
    client, tokens = bench.fresh(), bench.sequences[1]
    weights = np.resize([-1.0, 1e-6, 0.0, 0.25], len(tokens) - 1)
    bench.forward_backward(client, [of_datum(tokens, weights=weights)])
    bench.forward_backward(client, [of_datum(tokens, weights=-weights)])
    _stands_still(bench, found, client, "weights and their opposites")
    bench.forward_backward(client, [of_datum(tokens), of_datum(tokens)])
    bench.forward_backward(client, [of_datum(tokens, weights=[-2.0] * (len(tokens) - 1))])
    _stands_still(bench, found, client, "a datum twice, and once with weights of -2")


def losses(bench: Bench, found: Findings) -> None:
    """The gradient of each policy loss is that of cross-entropy with the weights that its formula gives in NumPy."""
    client, rng, p = bench.fresh(), np.random.default_rng(0), bench.at_start
    q, a = np.minimum(p - rng.uniform(-0.5, 0.5, p.size), -1e-3), rng.uniform(-1, 1, p.size)
    r = np.exp(p - q)

    def ppo(low: float, high: float) -> FloatArray:
        return np.where(((a > 0) & (r > high)) | ((a < 0) & (r < low)), 0, r * a)

    narrow = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.05}
    cases: list[tuple[str, FloatArray, dict[str, float]]] = [
        ("importance_sampling", r * a, {}),
        ("ppo", ppo(0.8, 1.2), {}),
        ("ppo", ppo(0.7, 1.05), narrow),
        ("cispo", np.clip(r, 0.7, 1.05) * a, narrow),
        ("dro", a - 0.2 * (p - q), {"beta": 0.2}),
    ]
    for name, weights, config in cases:
        what = f"{name}, bounds 0.7 and 1.05" if config is narrow else name
        try:
            bench.forward_backward(client, bench.batch_of(logprobs=q, advantages=a), name, **config)
        except REFUSALS as error:  # the others need not be offered
            (found.wrong if name == "importance_sampling" else found.right).append(f"{what} is refused: {error!s:.60}")
            continue
        bench.forward_backward(client, bench.batch_of(weights=-weights))
        _stands_still(bench, found, client, what)


def custom(bench: Bench, found: Findings) -> None:
    """`forward_backward_custom` has the gradient that its function has in NumPy."""
    client, p = bench.fresh(), bench.at_start

    def loss(_: list[object], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        joined = torch.cat([each.flatten() for each in logprobs])
        return (joined.exp() + 0.1 * joined**2).sum() - 0.5 * joined.mean() ** 3, {}

    bench.get(client.forward_backward_custom(bench.batch(), loss))
    derivative = np.exp(p) + 0.2 * p - 1.5 * p.mean() ** 2 / p.size
    bench.forward_backward(client, bench.batch_of(weights=derivative))  # the loss of weights w is -sum w p
    _stands_still(bench, found, client, "its gradient less that of NumPy")


def optimizer(bench: Bench, found: Findings) -> None:
    """Every field of AdamParams counts, at the step that has it, as AdamW defines it."""
    client = bench.fresh()
    unit = bench.move(bench.learn, client)
    moved = bench.move(lambda c: bench.learn(c, 0.0), client)
    found.equal("learning_rate 0 after another", moved, 0 * moved)
    found.ratio("learning_rate, twice", bench.move(lambda c: bench.learn(c, 2.0)), unit, 2)
    for beta in (0.5, 0.9):
        first, second, third = _momentum(bench, beta1=beta)
        found.ratio(f"beta1 {beta}, second move", second, first, beta / (1 + beta))
        found.equal(f"beta1 {beta}, then 0", third, 0 * third)
    trial = bench.move(lambda c: bench.learn(c, eps=1e-12, learning_rate=bench.alpha))
    tiny = {"eps": 1e-12, "learning_rate": bench.alpha * float(np.abs(unit).max() / np.abs(trial).max())}
    for beta in (0.3, 0.9):
        first, second, _ = _momentum(bench, beta1=0.5, beta2=beta, **tiny)
        found.ratio(f"beta2 {beta}, second move", second, first, 1 / 3 / np.sqrt(beta / (1 + beta)))
    for what, fields, expected in (("large", {}, 2), ("tiny", tiny, 1)):
        once, twice = (bench.move(lambda c, w=w, f=fields: bench.learn(c, weight=w, **f)) for w in (1.0, 2.0))
        found.ratio(f"eps {what}, twice the gradient", twice, once, expected)
    decayed = bench.fresh()
    bench.learn(decayed, weight=0.0, learning_rate=0.1, weight_decay=10.0, eps=1e9)
    found.equal("weight_decay 10 x learning_rate 0.1", bench.scores(decayed), bench.scores(bench.new()))
    # A step of gradient descent lowers the loss by alpha |g|^2, which gives the norm at which to clip.
    norm = float(np.sqrt(max(unit.sum(), 0) / bench.alpha))
    for share in (0.25, 0.5, 4.0):
        moved = bench.move(lambda c, clip=share * norm: bench.learn(c, grad_clip_norm=clip))
        found.ratio(f"grad_clip_norm {share:g} of the norm", moved, unit, min(share, 1))


def _momentum(bench: Bench, **fields: float) -> list[FloatArray]:
    """The moves of a step with a gradient, of one with a gradient of 0, and of one more that has a beta1 of 0."""
    client, steps = bench.fresh(), ((1.0, {}), (0.0, {}), (0.0, {"beta1": 0.0}))
    return [
        bench.move(lambda c, w=weight, last=last: bench.learn(c, weight=w, **{**fields, **last}), client)
        for weight, last in steps
    ]


def _stands_still(bench: Bench, found: Findings, client: Any, what: str) -> None:
    """Notes that a step with the gradient so far, which should be 0, changes no log-prob."""
    moved = bench.move(bench.step, client)
    found.equal(what, moved, 0 * moved)
