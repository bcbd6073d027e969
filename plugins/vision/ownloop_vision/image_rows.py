"""Questions about images, from a data set with a column of images: a name of the Hub, a folder, or a file.

    ImageRows(dataset="lmms-lab/some-set", question_column="question", answer_column="answer")
    ImageRows(dataset="pictures/", question="What is this?", answer_column="label")      # a folder for each label

A tenth of the rows is held out, chosen by their questions with their images. Files of images stay on the disk until a
row is asked for.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ownloop_tasks.data_sets import load_columns, text_of
from ownloop_vision.qwen_images import file_bytes
from rl.checks import named_function
from rl.configuration import configuration
from rl.data.rows import python_order, spaced_alike, split, stream
from rl.envs.procedural import TextProblem
from rl.types import PathOrName


@configuration
class ImageRows:
    """Answer a question about one image or several. Reward 1 for exactly the answer, or what `reward` returns."""

    dataset: PathOrName
    """`ORG/NAME` of the Hub, a folder that `datasets` can load, or a file (.parquet, .jsonl, .json, .csv)."""
    answer_column: str
    """Text, or a class label, which becomes its name."""
    image_column: str = "image"
    """An image, or a list of them: what `datasets` makes of images, paths (from the file's folder on) or data URLs."""
    question_column: str = ""
    """The column of questions; empty if all rows ask `question`."""
    question: str = ""
    """What every row asks, if there is no column of questions."""
    reward: str = ""
    """`"module:function"`, called with the answer and the completion; empty for 1 if they are equal, and else 0."""
    split: str = "train"
    """The part of the data set. A tenth of it is held out."""
    subset: str | None = None
    """The configuration of a data set of the Hub."""
    revision: str | None = None
    """A commit, branch or tag of a data set of the Hub."""

    def __post_init__(self) -> None:
        """Reads the data set. Raises ValueError naming the field, the value and what is accepted."""
        if bool(self.question) == bool(self.question_column):
            raise ValueError(
                f"ImageRows.question is {self.question!r} and question_column {self.question_column!r}; one of them "
                "must be given"
            )
        self._score("")
        rows = self._rows()
        if not rows.train or not rows.held_out:
            raise ValueError(
                f"ImageRows.dataset {self.dataset!r} has {len(rows.train)} training and {len(rows.held_out)} held-out "
                "rows; both need at least one (about a tenth is held out)"
            )

    @property
    def name(self) -> str:
        """The data set's name without its extension."""
        return Path(self.dataset).stem

    @property
    def stop(self) -> tuple[str, ...]:
        """The model's own end token is enough."""
        return ()

    def train_problems(self, seed: int, start: int, count: int) -> list[TextProblem]:
        """See `rl.protocols.Env`. Every epoch has every row once, in an order of its own."""
        rows = self._rows()
        return [self._problem(rows, number) for number in stream(rows.train, python_order, seed, start, count)]

    def eval_problems(self, count: int) -> list[TextProblem]:
        """The first held-out rows. Raises ValueError if there are fewer."""
        rows = self._rows()
        if count > len(rows.held_out):
            raise ValueError(f"num_eval is {count}, but {self.dataset} has only {len(rows.held_out)} held-out rows")
        return [self._problem(rows, number) for number in rows.held_out[:count]]

    def _problem(self, rows: "_Rows", number: int) -> TextProblem:
        question, answer, images = rows.read(number)
        parts = [{"type": "image", "image": image} for image in images]
        return TextProblem(
            id=rows.ids[number],
            prompt=[{"role": "user", "content": [*parts, {"type": "text", "text": question}]}],
            score=self._score(answer),
            answer=answer,
        )

    def _score(self, answer: str) -> Callable[[str], float]:
        if not self.reward:
            return functools.partial(_exact, answer)
        return functools.partial(named_function("ImageRows.reward", self.reward), answer)

    def _rows(self) -> "_Rows":
        return _read(self)


class _Rows:
    """Columns of a data set, whose images are not decoded."""

    def __init__(self, env: ImageRows) -> None:
        names = [name for name in (env.image_column, env.question_column, env.answer_column) if name]
        columns = load_columns(
            env.dataset,
            columns=names,
            split=env.split,
            subset=env.subset,
            revision=env.revision,
            field="ImageRows.dataset",
        )
        where = f"ImageRows.dataset {env.dataset!r}, split {env.split!r}, column"
        path = Path(env.dataset).expanduser()
        self._folder = path if path.is_dir() else path.parent
        self._images = columns[env.image_column]
        self._answers = _texts(columns[env.answer_column], f"{where} {env.answer_column!r}")
        self._questions = [env.question] * len(self._answers)
        if env.question_column:
            self._questions = _texts(columns[env.question_column], f"{where} {env.question_column!r}")
        self.ids, asked = list[str](), list[str]()
        for number in range(len(self._answers)):
            question, answer, images = self.read(number)
            self.ids.append(_id(f"{question}\n{answer}", images))
            asked.append(_id(f"{spaced_alike(question)}", images))  # one question may have several answers
        self.train, self.held_out = split(range(len(asked)), asked.__getitem__)

    def read(self, number: int) -> tuple[str, str, list[bytes]]:
        """Question, answer and files of images of a row. Raises ValueError for an image that cannot be read."""
        found: Any = self._images[number]
        images: Sequence[object] = found if isinstance(found, list) else [found]
        return self._questions[number], self._answers[number], [file_bytes(self._located(each)) for each in images]

    def _located(self, image: Any) -> object:
        """A path from the file's folder on."""
        is_path = isinstance(image, str) and not image.startswith("data:") and "://" not in image[:16]
        return self._folder / image if is_path else image


_read = functools.lru_cache(maxsize=4)(_Rows)  # a loop asks for problems at every step


def _texts(values: Sequence[object], where: str) -> list[str]:
    return [text_of(value, f"{where}: row {number}") for number, value in enumerate(values)]


def _id(text: str, images: Sequence[bytes]) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=12)
    for image in images:
        digest.update(image)
    return digest.hexdigest()


def _exact(answer: str, completion: str) -> float:
    return float(completion.strip() == answer)
