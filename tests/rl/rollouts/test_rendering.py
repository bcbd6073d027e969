import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from rl.protocols import Done, Episode, Observation, Prompt, Reply
from rl.rollouts.episodes import rollout_group, rollout_to_datum
from rl.rollouts.rendering import ChatTemplateError, Renderer
from rl.tiny_models import tiny_llama
from rl.types import REASONING, Completion, SamplingParams

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
    position = whole.index(end_of_turn, len(before))  # sampled by the model, or added by the template
    said = whole[len(before) : position + closed]
    assert before + said + renderer.encode_reply(SECOND, said) == whole


def test_a_prefilled_answer_is_left_open(renderer: Renderer) -> None:
    begun = [*SECOND, {"role": "assistant", "content": "My next guess is "}]
    opened, asked = renderer.encode_reply(begun, []), renderer.encode_reply(SECOND, [])
    assert opened[: len(asked)] == asked
    assert opened[len(asked) :] == renderer.encode("My next guess is ")


@pytest.mark.stranger("C2")
@pytest.mark.parametrize("opens", REASONING)
def test_a_prompt_that_opens_reasoning_is_known(renderer: Renderer, opens: str) -> None:
    for end, found in (("", opens), ("\n\n ", opens), (" a", ""), (REASONING[opens], "")):
        assert renderer.opening(renderer.encode(f"Say why in {opens}, then answer. " + opens + end)) == found
    assert renderer.opening(()) == ""


def test_text_is_encoded_as_it_is(renderer: Renderer) -> None:
    assert renderer.encode_reply(" = 42", renderer.encode("6 * 7")) == renderer.encode(" = 42")


def test_a_chat_needs_a_template(tmp_path: Path) -> None:
    renderer = Renderer(tiny_llama(tmp_path))
    for encode in (lambda: renderer.encode(FIRST), lambda: renderer.encode_reply(FIRST, [])):
        with pytest.raises(ValueError, match="no chat template; give the prompt as one string"):
            encode()


def _with_end_of_turn(path: Path, *end_tokens: int) -> Renderer:
    """A model whose template closes a turn with w9, and whose `eos_token` is w2, as Gemma 3 and Phi 3 have two."""
    model = tiny_llama(path)
    text = "{% for m in messages %}{{ m.role }} {{ m.content }} w9 {% endfor %}"
    (model / "chat_template.jinja").write_text(text + "{% if add_generation_prompt %}assistant {% endif %}")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": end_tokens}))
    return Renderer(model)


def test_an_answer_in_a_chat_ends_as_the_template_ends_a_turn(tmp_path: Path) -> None:
    renderer = _with_end_of_turn(tmp_path, 2, 9)
    answer = renderer.encode_completion(FIRST, "w5 w6")
    assert answer == (5, 6, 9)
    assert renderer.encode_reply(SECOND, answer) == renderer.encode_reply(SECOND, ())[1:]
    assert renderer.encode_completion("w3 w4", "w5 w6") == (5, 6, 2)  # text has no turns


def test_an_answer_does_not_end_where_the_generator_would_go_on(tmp_path: Path) -> None:
    assert _with_end_of_turn(tmp_path, 2).encode_completion(FIRST, "w5 w6") == (5, 6, 2)


class Verbatim:
    """A generator that always answers with these tokens and records its prompts."""

    def __init__(self, said: list[tuple[int, ...]], texts: list[str]) -> None:
        self.said, self.texts = said, texts
        self.prompts: list[tuple[int, ...]] = []

    async def generate(self, prompt_tokens: Sequence[int], sampling: object, num_samples: int = 1) -> list[Completion]:
        self.prompts.append(tuple(prompt_tokens))
        tokens, text = self.said[len(self.prompts) - 1], self.texts[len(self.prompts) - 1]
        zeros = (0,) * len(tokens)
        return [Completion(tokens=tokens, logprobs=zeros, versions=zeros, text=text, finish_reason="stop")]


class Asking:
    """Two turns, as a chat or as text."""

    id = "asking"

    def __init__(self, *, chat: bool) -> None:
        self.prompt: Prompt = FIRST if chat else "Guess a number."
        self._again: Prompt = SECOND if chat else "Again!"

    def start(self) -> Episode:
        return _Asked(self._again)


class _Asked:
    def __init__(self, again: Prompt) -> None:
        self._again: Prompt | None = again

    def reply(self, completion: str) -> Reply:
        again, self._again = self._again, None
        return Done(reward=0.0) if again is None else Observation(messages=again)


@pytest.mark.parametrize("chat", [True, False])
def test_sampled_tokens_are_never_tokenised_again(renderer: Renderer, chat: bool) -> None:
    # A model may sample other tokens for a word than its tokenizer would choose: here letter by letter.
    said = [tuple(token for letter in text for token in renderer.encode(letter)) for text in ("hello", "world")]
    assert all(renderer.encode(text) != tokens for text, tokens in zip(("hello", "world"), said, strict=True))
    generator = Verbatim(said, ["hello", "world"])
    problem = Asking(chat=chat)
    group = asyncio.run(rollout_group(cast(Any, generator), renderer, problem, SamplingParams(max_tokens=8), 1))
    (rollout,) = group.rollouts
    prompt = renderer.encode(problem.prompt)
    between = renderer.encode_reply(SECOND if chat else "Again!", said[0])
    assert generator.prompts == [prompt, prompt + said[0] + between]
    datum = rollout_to_datum(rollout, 1.0)
    assert (*datum.tokens, datum.loss_inputs["target_tokens"][-1]) == prompt + said[0] + between + said[1]
    assert datum.loss_inputs["weights"].sum() == len(said[0]) + len(said[1])


@pytest.mark.stranger("C9")
def test_a_template_unfit_for_turns_ends_the_step(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }} {{ m.content | upper }}{% endfor %}"
    )
    generator: Any = Verbatim([(5,)], ["w5"])
    group = rollout_group(generator, Renderer(model), Asking(chat=True), SamplingParams(max_tokens=8), 1)
    with pytest.raises(ChatTemplateError, match="upper and lower case"):
        asyncio.run(group)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([], "a chat has no message"),
        (None, "a chat is None; text, or messages"),
        (5, "a chat is 5; text, or messages"),
        (["hi"], "a chat holds 'hi'; each message needs 'role' and 'content'"),
        ({"role": "user", "content": "hi"}, "a chat holds 'role'; each message"),
        ([{"content": "hi"}], "a chat holds .*; each message needs 'role'"),
        ([{"role": "user", "content": None}], "each message needs 'role' and 'content', both text"),
        ([{"role": "user", "content": [5]}], "each message needs 'role' and 'content', both text, or parts with im"),
        ([{"role": "user", "content": [{"type": "image"}]}], "or parts with images"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "or parts with images"),
        ([{"role": "user", "content": [{"type": "video", "video": "x"}]}], "or parts with images"),
        ([{"role": "user", "content": "a\ud800"}], "a chat holds the lone surrogate"),
    ],
)
def test_what_is_no_chat_is_named(renderer: Renderer, chat: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        renderer.encode(chat)


def test_a_call_needs_no_content(renderer: Renderer) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    user = {"role": "user", "content": "w5"}
    assert renderer.encode([user, call, user]) == renderer.encode([user, {**call, "tool_calls": []}, user])


def test_a_chat_that_the_template_refuses_names_the_model(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    config = json.loads((model / "tokenizer_config.json").read_text())
    template = "{{ raise_exception('System role not supported') }}"
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=f"template of {tmp_path} refuses this chat: System role not supported"):
        Renderer(model).encode([{"role": "system", "content": "w5"}])
