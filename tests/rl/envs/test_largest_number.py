import re

import pytest

from rl.envs.largest_number import LargestNumber


def test_reward_is_for_the_largest_number_alone() -> None:
    for problem in LargestNumber().train_problems(0, 0, 50):
        numbers = [int(n) for n in re.findall(r"\d+", problem.id)]
        assert len(set(numbers)) == 4
        answers = (f"{max(numbers)}.", f" {max(numbers)}", f"{min(numbers)}", "")
        rewards = [problem.reply(answer).reward for answer in answers]
        assert rewards == [1, 1, 0, 0]
        assert problem.prompt[0] == {"role": "user", "content": problem.id}


def test_splits_are_disjoint() -> None:
    env = LargestNumber()
    eval_data = {p.id for p in env.eval_problems(300)}
    assert len(eval_data) == 300
    assert eval_data.isdisjoint(p.id for seed in range(3) for p in env.train_problems(seed, 0, 500))


def test_more_problems_than_there_are_is_refused_soon() -> None:
    env = LargestNumber(count=2, low=0, high=9)  # 90 questions, of which about a tenth is held out
    with pytest.raises(
        ValueError, match=r"num_eval is 100000, but the environment has only about (\d+) distinct"
    ) as error:
        env.eval_problems(100_000)
    found = int(re.findall(r"about (\d+)", str(error.value))[0])
    assert len(env.eval_problems(found)) == found
    trained = {problem.id for problem in env.train_problems(0, 0, 5000)}
    assert found == 90 - len(trained)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 1}, "count is 1"),
        ({"low": -1}, "low is -1"),
        ({"low": 97, "high": 99}, "4 different numbers must fit"),
    ],
)
def test_impossible_ranges_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LargestNumber(**arguments)
