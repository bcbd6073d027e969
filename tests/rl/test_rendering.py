from pathlib import Path

import pytest

from rl.rendering import Renderer
from tests.tiny_models import tiny_llama

FIRST = [{"role": "user", "content": "Guess a number."}]
SECOND = [{"role": "user", "content": "Too low.\nAgain!"}]


@pytest.fixture(scope="module")
def renderer(smollm2: Path) -> Renderer:
    return Renderer(smollm2)


@pytest.mark.parametrize("answer", ["42", "I'd say 42.\n", "", "naïve ☃"])
@pytest.mark.parametrize("closed", [True, False])
def test_turns_make_up_the_chat_that_the_template_renders(renderer: Renderer, answer: str, closed: bool) -> None:
    whole = renderer.encode([*FIRST, {"role": "assistant", "content": answer}, *SECOND])
    before = renderer.encode(FIRST)
    end_of_turn = renderer.encode_reply(SECOND, [])[0]
    position = whole.index(end_of_turn, len(before))  # sampled by the model, or put there by the template
    said = whole[len(before) : position + closed]
    assert before + said + renderer.encode_reply(SECOND, said) == whole


def test_an_answer_begun_is_left_open(renderer: Renderer) -> None:
    begun = [*SECOND, {"role": "assistant", "content": "My next guess is "}]
    opened, asked = renderer.encode_reply(begun, []), renderer.encode_reply(SECOND, [])
    assert opened[: len(asked)] == asked
    assert opened[len(asked) :] == renderer.encode("My next guess is ")


def test_text_is_appended_as_it_stands(renderer: Renderer) -> None:
    assert renderer.encode_reply(" = 42", renderer.encode("6 * 7")) == renderer.encode(" = 42")


def test_a_chat_needs_a_template(tmp_path: Path) -> None:
    renderer = Renderer(tiny_llama(tmp_path))
    for encode in (lambda: renderer.encode(FIRST), lambda: renderer.encode_reply(FIRST, [])):
        with pytest.raises(ValueError, match="no chat template; give the prompt as one string"):
            encode()
