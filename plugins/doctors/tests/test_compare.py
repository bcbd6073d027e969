import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from controller.commands import cli
from controller.commands.show import _row  # pyright: ignore[reportPrivateUsage]
from controller.runs.folder import CONFIG_FILE, RunFolder, read_json, write_json
from controller.runs.metric_rows import SCHEMA_VERSION, last_row_with
from ownloop_doctors.compare import comparison, configurations_of
from tests.controller.runs.other_schemas import OTHER_SCHEMAS, run_of_schema


def _run(path: Path, seed: int, *rewards: float) -> Path:
    folder = RunFolder(path, {"seed": seed, "env": {"count": 4}})
    for step, reward in enumerate(rewards, start=1):
        folder.log_metrics({"step": float(step), "reward_mean": reward, "grad_norm": 0.125, "seconds_step": reward * 7})
    return folder.path


def test_runs_that_part_are_shown_side_by_side(tmp_path: Path) -> None:
    runs = _run(tmp_path / "a", 0, 0.1, 0.25, 0.5), _run(tmp_path / "b", 1, 0.1, 0.375, 0.4, 0.9)
    lines = list(comparison(*runs))
    assert lines[2] == "seed: 0 in A, 1 in B"
    assert lines[3].split() == ["step", "reward_mean", "A", "B", "grad_norm", "A", "B", "seconds_step", "A", "B"]
    assert [line.split()[:5] for line in lines[4:8]] == [
        ["1", "0.1", "0.1", "0.125", "0.125"],
        ["2", "0.25", "0.375", "0.125", "0.125"],
        ["3", "0.5", "0.4", "0.125", "0.125"],
        ["4", "-", "0.9", "-", "0.125"],
    ]
    assert len({len(line) for line in lines[3:8]}) == 1
    assert lines[8] == (
        "The runs first differ at step 2: reward_mean 0.25 and 0.375. The largest difference is that of reward_mean "
        "at step 2: 0.25 and 0.375."
    )


def test_runs_that_are_the_same_but_for_their_speed(tmp_path: Path) -> None:
    run, again = _run(tmp_path / "a", 0, 0.1, 0.25), _run(tmp_path / "b", 0, 0.1, 0.25)
    assert [*comparison(run, again)][-1] == "All metrics of the 2 steps that both have are the same, timings aside."
    assert [*comparison(run, _run(tmp_path / "c", 0))][-1] == "The runs have no step in common."


def _evaluated(path: Path, seed: int, *rewards: float, rate: float = 1e-5, steps: int = 10) -> str:
    folder = RunFolder(path, {"seed": seed, "learning_rate": rate, "env": {"count": 4}})
    for number, reward in enumerate(rewards):
        folder.log_metrics({"step": float(number * steps), "eval_reward": reward})
    return str(folder.path)


def _compare(*arguments: str) -> object:
    """The exit status."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", *arguments])
    return ended.value.code


def test_seeds_are_put_together_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = [_evaluated(tmp_path / f"s{i}", i, 0.3, end) for i, end in enumerate((0.50, 0.55, 0.47))]
    fast = [_evaluated(tmp_path / f"f{i}", i, 0.3, end, rate=2e-5) for i, end in enumerate((0.61, 0.64, 0.58))]
    file = tmp_path / "both.png"
    assert _compare(*slow, *fast, "--plot", str(file)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(
        "final held-out reward: A learning_rate 1e-05: mean 0.507, n = 3: 0.500 (seed 0, step 10), 0.550 (seed 1, "
    )
    assert "B learning_rate 2e-05: mean 0.610, n = 3: " in said
    assert (
        "B - A: +0.103, 95 % interval [+0.020, +0.187], p = 0.0271 (Welch's t-test over 3 and 3 seeds): significant at "
        "5 %."
    ) in said
    pixels = plt.imread(file)
    assert pixels.shape[:2] == (672, 1152)
    for colour in ((0x44, 0x77, 0xAA), (0xEE, 0x66, 0x77)):  # both configurations are in the picture
        assert (np.abs(pixels[..., :3] * 255 - colour).max(axis=-1) < 2).sum() > 100


def test_nothing_is_claimed_from_one_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = _evaluated(tmp_path / "one", 0, 0.3, 0.5)
    others = [_evaluated(tmp_path / f"other{i}", i, 0.3, 0.9, rate=2e-5, steps=20) for i in range(2)]
    assert _compare(one, *others) == 0
    assert _compare(one, others[0]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "B - A: nothing can be claimed from 2 and 1 seeds, since each side needs at least two; `ownloop sweep" in out
    assert "nothing can be claimed from 1 and 1 seeds" in out
    assert "The last evaluations are after different numbers of steps, 10 to 20." in out
    assert "significant" not in out


@pytest.mark.stranger("F6")
@pytest.mark.parametrize("columns", [None, 80, 60, 200])
def test_no_line_is_wider_than_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int | None
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    for name, rate in (("one", 1e-5), ("other", 2e-5)):
        folder = RunFolder(
            tmp_path / name, {"seed": 0, "learning_rate": rate, "env": {"words": ["a word"] * 20 * (rate > 1e-5)}}
        )
        folder.log_metrics({"step": 0.0, "eval_reward": 1 / 3, "eval_reward_low": 0.0, "eval_reward_high": 1.0})
        for step in range(1, 3):
            names = ("reward_mean", "loss", "grad_norm", "seconds_step")
            folder.log_metrics({"step": float(step), **dict.fromkeys(names, 1 / 3)})
    assert _compare("--runs", str(tmp_path), "one", "other") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= (columns or 80)
    tables = [line.split() for line in lines if line.startswith("  step")]
    assert [word for table in tables for word in table if word not in ("step", "A", "B")] == [
        "reward_mean",
        "eval_reward",
        "loss",
        "grad_norm",
        "seconds_step",
    ]
    assert len(tables) == {None: 2, 80: 2, 60: 3, 200: 1}[columns]


@pytest.mark.stranger("F6")
def test_all_configurations_are_named_in_the_same_way(tmp_path: Path) -> None:
    rates = (1e-5, 2e-5, 1e-5)
    runs = [Path(_evaluated(tmp_path / str(i), 0, 0.3, 0.5, rate=rate)) for i, rate in enumerate(rates)]
    config = read_json(runs[2] / CONFIG_FILE)
    write_json(runs[2] / CONFIG_FILE, {**config, "env": {"count": 5}})
    assert [configuration.name for configuration in configurations_of(runs)] == [
        "learning_rate 1e-05, env.count 4",
        "learning_rate 2e-05, env.count 4",
        "learning_rate 1e-05, env.count 5",
    ]
    assert [configuration.name for configuration in configurations_of(runs[:1])] == ["0"]


def test_a_run_is_compared_with_its_repeat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [_evaluated(tmp_path / name, 0, 0.3, 0.5) for name in ("once", "again")]
    assert _compare(*runs) == 0
    said = capsys.readouterr()
    assert "are the same" in said.out
    assert said.err == ""
    assert _compare(*runs, "--plot", str(tmp_path / "both.png")) == 2


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a",), "compare was given one run; it needs at least two"),
        (("a", "b", "again"), "have the same configuration and the same seed, 0; a comparison over seeds"),
        (("a", "b", "new"), "new has no evaluation of the held-out reward yet"),
        (("a", "b", "--plot", "out.pdf"), "--plot is out.pdf; the file's name must end in .png"),
        (("a", "nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: tuple[str, ...], message: str
) -> None:
    for seed, name in enumerate(("a", "b")):
        _evaluated(tmp_path / name, seed, 0.3, 0.5)
    _evaluated(tmp_path / "again", 0, 0.3, 0.6)
    _evaluated(tmp_path / "new", 7)
    assert _compare("--runs", str(tmp_path), *names) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("schema", "found"), OTHER_SCHEMAS)
def test_another_schema_is_refused(schema: int | None, found: int, tmp_path: Path) -> None:
    run = run_of_schema(tmp_path / "a", schema)
    with pytest.raises(ValueError, match=f"is a run of schema {found}"):
        list(comparison(run, run))


@pytest.mark.stranger("2.C11")
def test_long_runs_are_compared_in_a_page_and_read_from_their_ends(tmp_path: Path) -> None:
    names = ["reward_mean", "eval_reward", "loss", "grad_norm", "seconds_step"]
    for name in "ab":
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text('{"num_steps": 20000}')
        rows = [
            {
                "schema_version": SCHEMA_VERSION,
                "step": step,
                **dict.fromkeys(names, 0.5 + (step == 7777) * (name == "b")),
            }
            for step in range(1, 20001)
        ]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3')
    lines = [*comparison(tmp_path / "a", tmp_path / "b")]
    assert sum(map(len, lines)) < 12_000
    assert "first differ at step 7777" in lines[-1]
    shown = [line.split()[0] for line in lines if line.split()[0].isdigit()]
    assert {"1", "7777", "20000"} <= {*shown}
    file = tmp_path / "a" / "metrics.jsonl"
    assert last_row_with(file, "eval_reward") == {"step": 20000, **dict.fromkeys(names, 0.5)}
    assert last_row_with(file, "eval_rewar") is None
    with file.open("rb+") as stream:  # every line but the first and the last
        stream.seek(200)
        stream.write(b"x" * 1000)
    ((_, state, step, training, held_out, _),) = [_row(tmp_path / "a")]
    assert (state, step, training, held_out) == (
        "stopped, nothing saved",
        "20000/20000",
        "reward 0.500",
        "reward 0.500",
    )
