"""Losses of the user's own: where they are found, and the options that they declare."""

import inspect
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from rl.losses import LossInputs, get_loss
from tests.rl.losses.cases import random_case


@pytest.mark.stranger("B3")
def test_a_loss_may_lie_in_the_working_directory(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "my_own_losses.py").write_text("def f(logprobs, entropy, inputs): return logprobs.sum(), {}")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert get_loss("my_own_losses:f").name == "f"


def _typed(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    inputs: LossInputs,
    *,
    cap: float,
    steps: int = 1,
    kind: Literal["a", "b"] = "a",
    limit: "float | None" = None,
    weights: Mapping[str, float] | None = None,
    scale=2,  # pyright: ignore[reportMissingParameterType]
    name="x",  # pyright: ignore[reportMissingParameterType]
) -> tuple[torch.Tensor, dict[str, Any]]:
    return logprobs.sum(), {}


@pytest.mark.stranger("B3")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"cap": "0.5"}, r"loss_config\['cap'\] is '0.5'"),
        ({"cap": True}, r"\['cap'\] is True"),
        ({"cap": None}, r"\['cap'\] is None"),
        ({"cap": [1.0]}, r"\['cap'\] is \[1.0\]"),
        ({"cap": 1, "steps": 1.5}, r"\['steps'\] is 1.5"),
        ({"cap": 1, "kind": "c"}, r"\['kind'\] is 'c'"),
        ({"cap": 1, "limit": "x"}, r"\['limit'\] is 'x'"),
        ({"cap": 1, "weights": [1]}, r"\['weights'\] is \[1\]"),
        ({"cap": 1, "scale": "2"}, r"\['scale'\] is '2'"),
        ({"cap": 1, "name": 3}, r"\['name'\] is 3"),
        ({"capp": 1}, "did you mean 'cap'"),
        ({}, "loss_config lacks 'cap', which '_typed' needs"),
    ],
)
def test_a_wrong_option_of_a_users_loss_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_loss(_typed, config)


def test_a_users_loss_checks_the_ranges_of_its_options() -> None:
    right = {"cap": -1, "steps": 2, "kind": "b", "limit": None, "weights": {"a": 1.0}, "scale": 0.5, "name": "y"}
    assert get_loss(_typed, right).options == right


@pytest.mark.stranger("B3")
@pytest.mark.parametrize(
    ("module", "content", "message"),
    [
        ("broken_losses", "def f(:\n", "broken_losses.py, line 1"),
        ("ending_losses", "\nraise SystemExit(0)", r"SystemExit: 0 \(.*ending_losses.py, line 2\)"),
    ],
)
def test_a_mistake_in_a_users_module_is_named(
    module: str, content: str, message: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / f"{module}.py").write_text(content)
    monkeypatch.setattr(sys, "path", [*sys.path, ""])
    with pytest.raises(ValueError, match=f"loss is '{module}:f', which cannot be imported.*{message}"):
        get_loss(f"{module}:f")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, r"returned a NoneType; it must be \(loss, metrics\)"),
        (torch.zeros(()), r"returned a Tensor; it must be \(loss, metrics\)"),
        ((torch.zeros(()), None), r"returned a tuple; it must be \(loss, metrics\)"),
        ((1.0, {}), "returned a float; it must be a scalar sum"),
        ((torch.zeros(()), {"far": torch.zeros(3)}), r"tensor of shape \(3,\) as metric 'far'; it must be a scalar"),
        ((torch.zeros(()), {"far": "1"}), "returned a str as metric 'far'; it must be a scalar"),
        ((torch.zeros(()), {}), "does not depend on the scores"),
    ],
)
def test_what_a_function_returns_is_checked(result: Any, message: str) -> None:
    p, inputs = random_case()
    with pytest.raises(ValueError, match=f"loss '<lambda>' .*{message}"):
        get_loss(lambda _scores, _entropy, _inputs: result)(torch.tensor(p, requires_grad=True), None, inputs)


def test_a_metric_may_be_a_number() -> None:
    p, inputs = random_case()
    scores = torch.tensor(p, requires_grad=True)
    loss, metrics = get_loss(lambda scores, _e, _i: ((0 * scores).sum(), {"half": 0.5, "two": 2}))(scores, None, inputs)
    loss.backward()
    assert {name: value.item() for name, value in metrics.items()} == {"half": 0.5, "two": 2}


@pytest.mark.stranger("2.F1")
def test_an_error_says_where_the_function_raised_and_what_it_could_ask_for() -> None:
    p, inputs = random_case()

    def asks(_scores: Any, _entropy: Any, given: Any) -> Any:
        return given["foo"]

    with pytest.raises(
        ValueError, match=r"loss 'asks' raised KeyError: 'foo'; there are the inputs .*target_tokens"
    ) as raised:
        get_loss(asks)(torch.tensor(p), None, inputs)
    assert f"{__file__}, line {inspect.getsourcelines(asks)[1] + 1}, in asks" in str(raised.value)
    with pytest.raises(ZeroDivisionError) as noted:
        get_loss(lambda _scores, _entropy, _inputs: 1 / 0)(torch.tensor(p), None, inputs)
    assert f"{__file__}, line" in noted.value.__notes__[0]


@pytest.mark.stranger("2.F7")
@pytest.mark.parametrize("reduce", [torch.mean, torch.max, lambda terms: terms.sum() / len(terms), torch.sum])
def test_a_loss_must_be_a_sum(reduce: Any) -> None:
    p, inputs = random_case()
    loss = get_loss(lambda scores, _entropy, given: (reduce(scores * given["advantages"]), {}))
    scores = torch.tensor(p, requires_grad=True)
    if reduce is torch.sum:
        assert loss(scores, None, inputs)[0] == (scores * inputs["advantages"]).sum()
    else:
        with pytest.raises(ValueError, match=r"of its halves .*; it must be a sum over tokens"):
            loss(scores, None, inputs)


def test_a_loss_is_looked_at_where_both_halves_are_scored() -> None:
    p, inputs = random_case()
    scores, first = (
        torch.tensor(p, requires_grad=True),
        replace(inputs, datum_index=torch.zeros_like(inputs.datum_index)),
    )
    loss = get_loss(lambda scores, _entropy, _given: (scores.sum(), {"largest": scores.detach().max()}))
    assert loss(scores, None, first)[0] == scores.sum()
    mean = get_loss(lambda scores, _entropy, given: ((scores * given["advantages"]).mean(), {}))
    arrays = {**inputs.arrays, "advantages": torch.zeros_like(inputs["advantages"])}
    mean(scores, None, replace(inputs, arrays=arrays))  # 0 says nothing
    with pytest.raises(ValueError, match="must be a sum over tokens"):
        mean(scores, None, inputs)
