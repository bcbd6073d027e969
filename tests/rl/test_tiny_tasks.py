import pytest

from rl.tiny_tasks import NumberWords, in_words

_VALUES = {
    word: value
    for value, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen".split()
    )
} | {w: 10 * (i + 2) for i, w in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split())}


def _read(words: str) -> int:
    """Words to a number, left to right: the inverse function, implemented independently."""
    total = part = 0
    for word in words.replace("-", " ").replace(" and ", " ").split():
        if word == "thousand":
            total, part = total + part * 1000, 0
        elif word == "hundred":
            part *= 100
        else:
            part += _VALUES[word]
    return total + part


def test_words_read_back_as_the_number() -> None:
    for value in [*range(2000), *range(2000, 10**6, 997)]:
        assert _read(in_words(value)) == value


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "zero"), (40, "forty"), (99, "ninety-nine"), (500, "five hundred"), (1005, "one thousand and five")],
)
def test_words_are_english(value: int, words: str) -> None:
    assert in_words(value) == words


def test_reward_is_for_the_exact_digits() -> None:
    problem = NumberWords(num_digits=(4,)).train_problems(0, 0, 1)[0]
    answer = problem.id.rsplit(" ", 1)[-1]
    assert len(answer) == 4
    assert problem.prompt == (
        f"one hundred and five = 105\nthree thousand six hundred and seventy-two = 3672\n{in_words(int(answer))} = "
    )
    assert [problem.reply(text).reward for text in (answer, f"{answer}0", "", f"{answer}.")] == [1, 0, 0, 0]


def test_splits_are_disjoint_and_streams_differ() -> None:
    env = NumberWords()
    eval_data = {p.id for p in env.eval_problems(300)}
    streams = [{p.id for p in env.train_problems(seed, 0, 600)} for seed in range(2)]
    assert len(eval_data) == 300
    assert eval_data.isdisjoint(streams[0] | streams[1])
    assert len(streams[0] & streams[1]) < 300


@pytest.mark.parametrize("num_digits", [(), (3, 7), (0,)])
def test_digits_out_of_range_are_refused(num_digits: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="num_digits"):
        NumberWords(num_digits=num_digits)
