"""Chats in front of the template: the tokens are those of vLLM's chat endpoint, over the templates of all families."""

import asyncio
import json
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl.data.sources import JsonlExamples
from rl.protocols import Done, Observation
from rl.rollouts.chats import as_shown
from rl.rollouts.episodes import rollout_group
from rl.rollouts.rendering import Renderer, prompt_text
from rl.types import Completion, SamplingParams
from tests.rl.rollouts.chat_models import TEMPLATES, chat_model

pytestmark = pytest.mark.vllm
_SPEC = find_spec("trl")
_FILES = [] if _SPEC is None else sorted(Path(str(_SPEC.origin)).parent.glob("chat_templates/*[!g].jinja"))
_PARTS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}[{{ part.type }}] {{ part.text | trim }}
{% endfor %}{% endif %}{{ m.tool_calls | tojson if m.tool_calls else '' }}{{ m.reasoning_content or '' }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_MACRO = (
    "{% macro show(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}<{{ p.text }}>{% endfor %}{% endif %}"
    "{% endmacro %}{% for m in messages[:] %}{{ m.role + ':' + show(m['content']) }}{% endfor %}"
)
ALL = {**TEMPLATES, "parts": _PARTS, "macro": _MACRO, **{file.stem: file.read_text() for file in _FILES}}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

_TEXT = st.text('ab <>\n{"', max_size=12)
_PART = st.one_of(
    _TEXT,
    st.builds(
        lambda kind, text: {"type": kind, "text": text}, st.sampled_from(["text", "input_text", "output_text"]), _TEXT
    ),
)
_CONTENT = st.one_of(_TEXT, st.lists(_PART, min_size=1, max_size=3))
_ARGUMENTS = st.one_of(
    st.sampled_from(["", "{}", '{"a": 1}', '{"a": {"b": [1, "x"]}}', "[1]", "no JSON", '"text"']), st.just("null")
)


def _call(number: int, arguments: str) -> dict[str, Any]:
    return {"id": f"abcdefgh{number}", "type": "function", "function": {"name": "add", "arguments": arguments}}


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Chats of SDKs and data files: perhaps a system message, and then turns, some of which call a tool."""
    messages: list[dict[str, Any]] = [
        {"role": role, "content": draw(_CONTENT)} for role in draw(st.sampled_from([(), ("system",), ("developer",)]))
    ]
    for _ in range(draw(st.integers(0, 2))):
        messages.append({"role": "user", "content": draw(_CONTENT), **draw(st.sampled_from([{}, {"name": "ann"}]))})
        if calls := draw(st.lists(_ARGUMENTS, max_size=2)):
            content = draw(st.one_of(st.none(), _TEXT))
            asked = {"role": "assistant", "content": content, "tool_calls": [_call(*each) for each in enumerate(calls)]}
            messages.append(asked if content is not None or draw(st.booleans()) else {**asked, "content": None})
            messages += [
                {"role": "tool", "tool_call_id": f"abcdefgh{n}", "content": draw(_CONTENT)} for n in range(len(calls))
            ]
        reasoning = draw(st.sampled_from([{}, {"reasoning": "hm"}, {"reasoning_content": "hm"}, {"reasoning": None}]))
        unread = draw(st.sampled_from([{}, {"refusal": None, "tool_calls": [], "function_call": None, "weight": 1}]))
        messages.append({"role": "assistant", "content": draw(_CONTENT), **reasoning, **unread})
    return [*messages, {"role": "user", "content": draw(_CONTENT)}]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")

    @cache
    def make(family: str) -> Path:
        model = chat_model(folder / family, family if family in TEMPLATES else "chatml")
        (model / "chat_template.jinja").write_text(ALL[family])
        return model

    return make


def of_vllm(model: Path, tokenizer: Any, messages: Any, tools: Any) -> str:
    """What vLLM's chat endpoint shows the model. Raises what it raises."""
    from types import SimpleNamespace

    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

    config: Any = SimpleNamespace(
        multimodal_config=None, enable_prompt_embeds=False, revision=None, code_revision=None, trust_remote_code=False,
        model=str(model), hf_config=SimpleNamespace(model_type="llama"), allowed_local_media_path="",
        allowed_media_domains=None, is_multimodal_model=False,
    )  # fmt: skip
    request = ChatCompletionRequest.model_validate_json(json.dumps({"messages": messages, "tools": tools}))
    form = resolve_chat_template_content_format(None, tools, "auto", tokenizer, model_config=config)
    conversation, *_ = parse_chat_messages(request.messages, config, content_format=form)
    options: Any = (
        request.build_chat_params(None, "auto").with_defaults({"tools": tools}).get_apply_chat_template_kwargs()
    )
    options["tokenize"] = False
    return str(safe_apply_chat_template(config, tokenizer, conversation, **options))


@pytest.mark.stranger("2.D2")
@pytest.mark.parametrize("family", ALL)
@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(chat=chats(), tools=st.sampled_from([[], [TOOL]]))
def test_a_chat_has_the_tokens_of_vllms_endpoint(
    model_of: Callable[[str], Path], family: str, chat: list[dict[str, Any]], tools: list[Any]
) -> None:
    renderer = Renderer(model_of(family))
    tokenizer: Any = renderer._tokenizer  # pyright: ignore[reportPrivateUsage]
    try:
        expected = of_vllm(model_of(family), tokenizer, chat, tools or None)
    except Exception:  # this family's template refuses such a chat
        return
    shown = renderer._render(chat, tools)  # pyright: ignore[reportPrivateUsage]
    encoded = renderer._encode(shown)  # pyright: ignore[reportPrivateUsage]
    assert encoded == tuple(tokenizer.encode(expected, add_special_tokens=False))


@pytest.mark.stranger("2.D2")
def test_a_data_file_may_hold_what_sdks_write(tmp_path: Path) -> None:
    """Contents that are null beside calls, and lists of parts, as rows of JSONL."""
    asked = {"role": "user", "content": [{"type": "text", "text": "6 * 7"}]}
    called = {"role": "assistant", "content": None, "tool_calls": [_call(1, '{"a": 1}')]}
    result = {"role": "tool", "tool_call_id": "abcdefgh1", "content": [{"type": "text", "text": "42"}]}
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"prompt": [asked, called, result], "completion": "It is 42."}))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": "other", "completion": "more"}))
    (example,) = JsonlExamples(path=file, eval_path=tmp_path / "eval.jsonl").train_examples(0, 0, 1)
    template = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.a + 1 }}"
    model = chat_model(tmp_path / "m", template=template + "{% endfor %} {% endfor %}")
    assert Renderer(model)._render(cast(Any, example.prompt)).text == "6 * 7 2 42 "  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(ValueError, match="function_call, which no chat template shows"):
        Renderer(model).encode([asked, {"role": "assistant", "content": "", "function_call": {"name": "f"}}])


@pytest.mark.stranger("2.D2")
def test_a_judge_reads_parts_as_the_model_does() -> None:
    chat: Any = [{"role": "user", "content": ["a", "", {"type": "text", "text": "b "}]}]
    assert prompt_text(chat) == as_shown(chat, "")[0]["content"] == "a\nb "


@pytest.mark.stranger("2.D3")
@pytest.mark.parametrize("family", ALL)
def test_a_prefilled_answer_stays_as_it_is_written(model_of: Callable[[str], Path], family: str) -> None:
    renderer = Renderer(model_of(family))
    tokenizer: Any = renderer._tokenizer  # pyright: ignore[reportPrivateUsage]
    asked = {"role": "user", "content": "Why?"}

    def shown(content: Any) -> str:
        chat = [asked, {"role": "assistant", "content": content}]
        return renderer._render(chat).text  # pyright: ignore[reportPrivateUsage]

    try:
        begun = tokenizer.apply_chat_template(
            as_shown([asked, {"role": "assistant", "content": "Because"}], ALL[family]),
            tokenize=False,
            continue_final_message=True,
        )
    except Exception:  # this family's template takes no such chat
        return
    assert shown("Because") == begun
    before = begun.removesuffix("Because")
    for said in ("", "Be ", "Be\n\n", "Be.\t"):
        assert shown(said) == before + said
    assert shown([{"type": "text", "text": "Be "}]) == before + "Be "


_NUMBERED = """{% for m in messages %}<|im_start|>[{{ loop.index }}] {{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>[{{ messages | length + 1 }}] assistant
{% endif %}"""


@pytest.mark.stranger("2.D3")
def test_a_template_may_number_its_messages(tmp_path: Path) -> None:
    renderer = Renderer(chat_model(tmp_path / "m", template=_NUMBERED, ends=["<|im_end|>"]))
    heard: list[str] = []

    class Sampler:
        async def generate(self, tokens: Any, sampling: SamplingParams, num_samples: int = 1) -> list[Completion]:
            del sampling, num_samples
            heard.append(renderer._tokenizer.decode(tokens))  # pyright: ignore[reportPrivateUsage]
            said = renderer.encode("yes<|im_end|>")
            zeros = (0.0,) * len(said)
            return [
                Completion(tokens=said, logprobs=zeros, versions=(0,) * len(said), text="yes", finish_reason="stop")
            ]

    class Asking:
        id, prompt, best_reward = "p", [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], 1.0

        def start(self) -> "Asking":
            return self

        def reply(self, answer: Any) -> Any:
            del answer
            more = {"role": "user", "content": "more"}
            return Done(reward=1.0) if len(heard) == 3 else Observation(messages=[more, more])

    sampler: Any = Sampler()
    problem: Any = Asking()
    group = asyncio.run(rollout_group(sampler, renderer, problem, SamplingParams(max_tokens=9), 1))
    assert not group.failures
    chat: list[Any] = [*problem.prompt]
    for text in heard:
        assert text == renderer._tokenizer.decode(renderer.encode(chat))  # pyright: ignore[reportPrivateUsage]
        chat += [{"role": "assistant", "content": "yes"}, *[{"role": "user", "content": "more"}] * 2]
