import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl.data.rows import is_eval
from rl.data.sources import EnvExamples, EnvPreferences, JsonlExamples, JsonlPreferences
from rl.envs.largest_number import LargestNumber
from rl.envs.procedural import TextProblem
from rl.envs.reasoning import ReasoningGym
from rl.protocols import Problem

MESSAGES = [{"role": "user", "content": "hello"}]


def _write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _examples(path: Path, count: int = 60, word: str = "question") -> Path:
    return _write(path, *({"prompt": f"{word} {i}", "completion": f"answer {i}", "more": 1} for i in range(count)))


def test_every_epoch_has_every_example_once_in_its_own_order(tmp_path: Path) -> None:
    data = JsonlExamples(
        path=_examples(tmp_path / "data.jsonl"), eval_path=_examples(tmp_path / "eval.jsonl", 3, "held out")
    )
    epochs = [[e.completion for e in data.train_examples(7, start, 60)] for start in (0, 60, 120)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(f"answer {i}" for i in range(60))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [e.completion for e in data.train_examples(8, 0, 60)] != epochs[0]
    # A run resumed anywhere, also across the end of an epoch, sees the same examples.
    assert [e.completion for e in data.train_examples(7, 50, 20)] == epochs[0][50:] + epochs[1][:10]
    assert [e.prompt for e in data.eval_examples(2)] == ["held out 0", "held out 1"]
    assert len(data.eval_examples(200)) == 3


def test_a_tenth_is_held_out_by_its_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i % 100}", "completion": f"answer {i}"} for i in range(300)]
    data = JsonlExamples(path=_write(tmp_path / "data.jsonl", *rows))
    eval_examples = data.eval_examples(300)
    train = data.train_examples(0, 0, 300 - len(eval_examples))
    assert {e.id for e in eval_examples}.isdisjoint(e.id for e in train)
    assert len({e.completion for e in (*eval_examples, *train)}) == 300
    assert all(is_eval(e.id) for e in eval_examples)
    assert 0.03 < len(eval_examples) / 300 < 0.2


@pytest.mark.stranger("D2")
def test_prompts_of_the_held_out_file_are_not_trained_on(tmp_path: Path) -> None:
    held_out = [{"prompt": p, "completion": "x", "chosen": "x", "rejected": "y"} for p in ("a", MESSAGES, " b\n")]
    known = [{**row, "completion": "another", "chosen": "z"} for row in (*held_out, {**held_out[0], "prompt": "b"})]
    path, both = _write(tmp_path / "eval.jsonl", *held_out), _write(tmp_path / "train.jsonl", *known)
    with pytest.raises(ValueError, match=r"train.jsonl has no prompt to train on that is not held out in eval_path"):
        JsonlExamples(path=both, eval_path=path).train_examples(0, 0, 1)
    new = _write(tmp_path / "more.jsonl", *known, {**held_out[0], "prompt": "new"})
    assert {e.id for e in JsonlExamples(path=new, eval_path=path).train_examples(0, 0, 9)} == {"new"}
    assert {p.id for p in JsonlPreferences(path=new, eval_path=path).train_preferences(0, 0, 9)} == {"new"}
    assert len(JsonlExamples(path=new, eval_path=path).eval_examples(9)) == 3


@pytest.mark.stranger("2.D10")
def test_every_form_of_a_prompt_is_on_one_side(tmp_path: Path) -> None:
    image, call = (
        {"type": "image", "image": "a.png"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
    )
    questions = [f"is\n{number} odd?" for number in range(60)]
    rows = [
        {"prompt": [{"role": "user", "content": content}, *more], "completion": question}
        for question in questions
        for said in (question, f"{question} ", question.replace("\n", "  "))
        for content, more in ((said, []), ([{"type": "text", "text": said}], []), ([image, said], []), (said, [call]))
    ]
    data = JsonlExamples(path=_write(tmp_path / "data.jsonl", *rows))
    held_out = Counter((e.completion, len(e.prompt), "image" in str(e.prompt)) for e in data.eval_examples(len(rows)))
    assert {(kind[1:], count) for kind, count in held_out.items()} == {((1, False), 6), ((1, True), 3), ((2, False), 3)}


def test_prompts_may_be_chats(tmp_path: Path) -> None:
    row = {"prompt": MESSAGES, "completion": "hi"}
    path = _write(tmp_path / "data.jsonl", row)
    (example,) = JsonlExamples(path=path, eval_path=path).eval_examples(5)
    assert example.prompt == MESSAGES
    assert example.id == "hello"


@pytest.mark.stranger("D1")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"}', r"data.jsonl:3 lacks 'completion'; it has 'prompt'"),
        ("{}", r"data.jsonl:3 lacks 'prompt'; it has no field"),
        ('{"prompt": "a", "completion": ""}', r"data.jsonl:3: 'completion' is empty"),
        ('{"prompt": "a", "completion": 7}', r"data.jsonl:3: 'completion' is a int; text is needed"),
        ('{"prompt": 7, "completion": "b"}', r"data.jsonl:3: 'prompt' is 7; text, or messages"),
        ('{"prompt": [], "completion": "b"}', r"data.jsonl:3: 'prompt' is \[\]; text, or messages"),
        ('{"prompt": [{"role": "user"}], "completion": "b"}', r"data.jsonl:3: 'prompt' holds .* needs 'role' and"),
        ('{"prompt": "a", ', r"data.jsonl:3 is not JSON"),
        ('{"prompt": "a", "completion": "b", "x": ' + "[" * 9999, r"data.jsonl:3 is not JSON: maximum recursion depth"),
        ('{"prompt": "a", "completion": "b", "x": ' + "1" * 5000 + "}", r"data.jsonl:3 is not JSON: .* .4300 digits"),
        (
            r'{"prompt": "a", "completion": "a \ud800"}',
            r"data.jsonl:3: 'completion' holds the lone surrogate '\\ud800' in .*a ",
        ),
        (
            r'{"prompt": [{"role": "user", "content": "\udfff"}], "completion": "b"}',
            r"data.jsonl:3: 'prompt' .* '\\udfff'",
        ),
        ('["a", "b"]', r"data.jsonl:3 is a list; a JSON object is needed"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"prompt": "a", "completion": "b"}}\n\n{line}\n')  # empty lines are skipped but counted
    with pytest.raises(ValueError, match=message):
        JsonlExamples(path=path).train_examples(0, 0, 1)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "completion": "b"}\r\n')
    assert JsonlExamples(path=path, eval_path=path).eval_examples(1)[0].prompt == "a"


def test_files_with_nothing_to_learn_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*; it should hold one JSON object per line"):
        JsonlExamples(path=tmp_path / "none.jsonl").eval_examples(1)
    with pytest.raises(ValueError, match="holds no line"):
        JsonlExamples(path=_write(tmp_path / "empty.jsonl")).eval_examples(1)
    with pytest.raises(ValueError, match=r"too few prompts to hold out a tenth of them: .* in a file of its own"):
        JsonlExamples(path=_examples(tmp_path / "short.jsonl", 1)).eval_examples(1)


def test_preferences_are_lines_with_two_answers(tmp_path: Path) -> None:
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    path = _write(tmp_path / "good.jsonl", good)
    data = JsonlPreferences(path=path, eval_path=_write(tmp_path / "eval.jsonl", {**good, "prompt": "z"}))
    (pair,) = data.train_preferences(0, 5, 1)
    assert (pair.prompt, pair.chosen, pair.rejected) == ("a", "b", "c")
    assert [p.prompt for p in data.eval_preferences(3)] == ["z"]
    same = _write(tmp_path / "same.jsonl", good, {**good, "rejected": "b"})
    with pytest.raises(ValueError, match=r"same.jsonl:2: 'chosen' and 'rejected' are the same"):
        JsonlPreferences(path=same).eval_preferences(1)
    lacking = _write(tmp_path / "lacking.jsonl", {"prompt": "a", "chosen": "b"})
    with pytest.raises(ValueError, match=r"lacking.jsonl:1 lacks 'rejected'"):
        JsonlPreferences(path=lacking).eval_preferences(1)


def test_an_environment_gives_its_right_and_wrong_answers() -> None:
    env = LargestNumber()
    examples, pairs = EnvExamples(env=env), EnvPreferences(env=env)
    problems = {p.id: p for p in (*env.train_problems(3, 10, 20), *env.eval_problems(20))}
    given = [*examples.train_examples(3, 10, 20), *examples.eval_examples(20)]
    assert len({e.id for e in given}) > 35
    assert all(problems[e.id].score(e.completion) == 1 for e in given)
    both = [*pairs.train_preferences(3, 10, 20), *pairs.eval_preferences(20)]
    assert all(problems[p.id].score(p.chosen) == 1 and problems[p.id].score(p.rejected) == 0 for p in both)
    assert all(p.rejected in p.id for p in both)  # one of the numbers in question, not any number
    assert both == [*pairs.train_preferences(3, 10, 20), *pairs.eval_preferences(20)]


class Unanswered:
    """An environment without answers."""

    name = "riddles"
    stop = ()

    def train_problems(self, seed: int, start: int, count: int) -> list[Problem]:
        return [TextProblem(id=f"{seed}/{i}", prompt="?", score=float) for i in range(start, start + count)]

    def eval_problems(self, count: int) -> list[Problem]:
        return self.train_problems(0, 0, count)


def test_an_environment_that_knows_no_answers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"environment 'riddles' knows no answer to problem '0/0'.* or a JSONL file"):
        EnvExamples(env=Unanswered()).eval_examples(1)
    with pytest.raises(ValueError, match=r"environment 'chain_sum' knows no wrong answer to problem"):
        EnvPreferences(env=ReasoningGym(task="chain_sum")).eval_preferences(1)


def test_supervised_data_that_would_not_show_tools_are_refused() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class WithTools(TextProblem):
        tools: tuple[dict[str, str], ...] = ({"name": "calculate"},)

    class Sums(Unanswered):
        def train_problems(self, seed: int, start: int, count: int) -> list[Problem]:
            return [WithTools(id=str(i), prompt="6 * 7", score=float, answer="42") for i in range(start, start + count)]

    with pytest.raises(ValueError, match=r"problem '0' of environment 'riddles' has tools"):
        EnvExamples(env=Sums()).train_examples(0, 0, 1)
