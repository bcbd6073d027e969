import json

from rl.rollouts.serialization import group_rows, groups_from_rows
from rl.runs.folder import to_json
from rl.types import Group, Rollout, Turn
from tests.rl.fakes import completion, single_turn


def test_groups_come_back_as_they_were() -> None:
    answers = [completion("ab", version=3), completion("c", version=4)]
    turns = tuple(Turn(prompt_tokens=(5 + i,), completion=answer) for i, answer in enumerate(answers))
    groups = [
        Group(
            problem_id="p",
            prompt="2+2?",
            rollouts=(
                Rollout(turns=turns, reward=0.1 + 0.2, metrics={"tries": 2.0}, environment_s=1.5),
                Rollout(turns=turns, reward=-1.0, out_of_context=True),
            ),
            failures=("it hung",),
        ),
        Group(problem_id="p", prompt="2+2?", rollouts=(single_turn((1, 2), answers[0], reward=1.0),)),
    ]
    rows = json.loads(json.dumps(to_json([row for group in groups for row in group_rows(group)])))
    assert groups_from_rows(rows) == groups
    assert groups_from_rows(rows)[0].rollouts[0].environment_s == 1.5
