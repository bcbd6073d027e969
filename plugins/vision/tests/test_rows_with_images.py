"""Data sets with columns of images become questions with images: Parquet, folders of classes, JSON lines."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ownloop_doctors.check_env import check_env
from ownloop_vision.colours import COLOURS, WORDS, draw
from ownloop_vision.image_prompts import content_hash
from ownloop_vision.image_rows import ImageRows
from ownloop_vision.tiny_vl import tiny_qwen3_vl
from rl.images import PlacedImage, images_of
from rl.rollouts.rendering import Renderer

NUM_ROWS = 240


def pictures(folder: Path) -> list[tuple[Path, str]]:
    """Files, in a folder for each colour, and their colours."""
    rng, found = random.Random(0), list[tuple[Path, str]]()
    for number in range(NUM_ROWS):
        colour = [*COLOURS][number % len(COLOURS)]
        file = folder / colour / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(draw(colour, rng))
        found.append((file, colour))
    return found


def as_parquet(folder: Path, *, several: bool) -> ImageRows:
    import datasets  # takes a second

    made = pictures(folder / "pictures")
    images: list[Any] = [[str(file), str(file)] if several else str(file) for file, _ in made]
    kind = datasets.List(datasets.Image()) if several else datasets.Image()
    features = datasets.Features({"image": kind, "asked": datasets.Value("string"), "answer": datasets.Value("string")})
    columns = {"image": images, "asked": [" which colour ?"] * NUM_ROWS, "answer": [colour for _, colour in made]}
    datasets.Dataset.from_dict(columns, features=features).to_parquet(folder / "rows.parquet")
    return ImageRows(dataset=str(folder / "rows.parquet"), question_column="asked", answer_column="answer")


def as_folder(folder: Path) -> ImageRows:
    pictures(folder)
    return ImageRows(dataset=str(folder), question=" which colour ?", answer_column="label")


def as_lines(folder: Path) -> ImageRows:
    rows = [{"image": str(file.relative_to(folder)), "answer": colour} for file, colour in pictures(folder)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ImageRows(dataset=str(folder / "rows.jsonl"), question=" which colour ?", answer_column="answer")


@pytest.mark.parametrize("kind", ["parquet", "several", "folder", "lines"])
def test_rows_become_questions_with_images(kind: str, tmp_path: Path) -> None:
    if kind in ("parquet", "several"):
        env = as_parquet(tmp_path, several=kind == "several")
    else:
        env = as_folder(tmp_path) if kind == "folder" else as_lines(tmp_path)
    assert check_env(env) == []
    train, (held_out,) = env.train_problems(0, 0, 8), env.eval_problems(1)
    assert held_out.id not in {problem.id for problem in train}
    renderer = Renderer(tiny_qwen3_vl(tmp_path / "model", WORDS))
    for problem in train[:2]:
        images = images_of(renderer.encode_problem(problem))
        assert len(images) == (2 if kind == "several" else 1)
        file = next(path for path in tmp_path.rglob("*.png") if path.read_bytes() == images[0].data)
        assert problem.answer == file.parent.name
        assert (problem.reply(file.parent.name).reward, problem.reply("grey").reward) == (1, 0)


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    env = as_lines(tmp_path)
    for changes, said in (
        ({"question": ""}, "question is '' and question_column ''; one of them must be given"),
        ({"answer_column": "label"}, "has no column 'label'; it has the columns 'image', 'answer'"),
        ({"reward": "nowhere:exact"}, 'reward is .nowhere:exact.*it must be "module:function"'),
        ({"dataset": str(tmp_path / "none.jsonl")}, "which cannot be loaded: there is no such file"),
    ):
        given = {"dataset": env.dataset, "question": env.question, "answer_column": env.answer_column}
        with pytest.raises(ValueError, match=said):
            ImageRows(**{**given, **changes})
    with pytest.raises(ValueError, match=r"num_eval is 240, but .* has only"):
        env.eval_problems(240)


@pytest.mark.stranger("2.D4")
def test_answers_are_the_texts_of_the_file(tmp_path: Path) -> None:
    made = pictures(tmp_path)
    lines = [f"{file.relative_to(tmp_path)},00{i}" for i, (file, _) in enumerate(made)]
    (tmp_path / "rows.csv").write_text("\n".join(["image,answer", *lines]))
    env = ImageRows(dataset=str(tmp_path / "rows.csv"), question="which?", answer_column="answer")
    assert {problem.answer for problem in env.train_problems(0, 0, 20)} <= {f"00{i}" for i in range(NUM_ROWS)}
    for value in ("null", "NaN", "[1]"):
        rows = [f'{{"image": "{file.relative_to(tmp_path)}", "answer": {value}}}' for file, _ in made]
        (tmp_path / "rows.jsonl").write_text("\n".join(rows))
        with pytest.raises(ValueError, match="column 'answer': row 0 is"):
            ImageRows(dataset=str(tmp_path / "rows.jsonl"), question="which?", answer_column="answer")


@pytest.mark.stranger("2.D10")
def test_a_question_about_an_image_is_on_one_side_with_all_its_answers(tmp_path: Path) -> None:
    asked = [("which?", "a"), ("which?", "b"), (" which?\n", "c")]
    rows = [
        {"image": str(file.relative_to(tmp_path)), "q": question, "answer": f"{number} {answer}"}
        for number, (file, _) in enumerate(pictures(tmp_path))
        for question, answer in asked
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    env = ImageRows(dataset=str(tmp_path / "rows.jsonl"), question_column="q", answer_column="answer")
    held_out = Counter(p.answer.split()[0] for p in env.eval_problems(15) if p.answer)
    assert len({p.id for p in env.eval_problems(15)}) == 15
    assert {*held_out.values()} == {3}


def test_the_hash_is_of_the_file_and_of_what_is_read() -> None:
    one = PlacedImage(start=0, num_tokens=2, data=b"file", inputs={"pixels": np.arange(6.0)})
    assert content_hash(one) == content_hash(one.moved(4)) != content_hash(replace(one, data=b"another"))
    assert content_hash(replace(one, inputs={"pixels": np.arange(6.0) + 1})) != content_hash(one)
