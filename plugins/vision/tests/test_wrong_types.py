"""Fields of environments with images whose values have other types."""

from pathlib import Path
from typing import Any

import pytest

from ownloop_vision.colours import GuessColour
from ownloop_vision.image_rows import ImageRows
from tests.rl.envs.wrong_types import FAILING_MODULES, OTHER_VALUES, assert_field_is_named, fields_of

_REQUIRED: dict[type, dict[str, Any]] = {
    GuessColour: {},
    ImageRows: {"dataset": "x.jsonl", "answer_column": "answer", "question": "What?"},
}


@pytest.mark.parametrize(("kind", "field"), fields_of(_REQUIRED), ids=str)
@pytest.mark.parametrize("value", OTHER_VALUES)
def test_a_field_of_another_type_is_named(kind: Any, field: str, value: object) -> None:
    assert_field_is_named(kind, _REQUIRED[kind], field, value)


@pytest.mark.parametrize(("module", "content", "said"), FAILING_MODULES)
def test_a_module_of_the_users_that_fails_is_named(
    module: str, content: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{module}.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=rf"reward is '{module}:f'.*{said}"):
        ImageRows(dataset="rows.jsonl", answer_column="a", question="?", reward=f"{module}:f")
