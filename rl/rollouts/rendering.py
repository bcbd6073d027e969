"""Renders prompts and replies to tokens with the model's own tokenizer. Sampled tokens are never tokenised again.

    prompt           answer     reply                                      answer
    ... assistant\n  42<end>    \n ... user\nAgain<end>\n ... assistant\n  43<end>

A chat template renders whole chats only. So its text before and after an answer is read off a short chat
whose answer is a mark. The contents of messages are text: a control token that a user's or a tool's message spells out
is encoded as the characters that it is written with.
"""

import contextlib
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol, cast

from rl.checks import prompt_fault, surrogate_fault
from rl.images import PlacedImage, TokensWithImages, images_of
from rl.protocols import Problem, ProblemOptions, Prompt, given
from rl.rollouts.chats import as_shown, text_of
from rl.rollouts.tokenizer import TextEncoder, load_tokenizer
from rl.system.hf_config import end_token_ids, read_config, vision_of
from rl.types import REASONING, Group, Turn

# Stands for an answer in a rendered chat. A template that changes answers changes this: it has both cases, digits, a
# line break and two spaces, and is longer than what a template might cut answers to.
_MARK = "\n".join(f"Ownloop's mark  of an answer, line {number}." for number in range(20))
_ANSWER = {"role": "assistant", "content": _MARK}
_QUESTION = {"role": "user", "content": "3141592653589793"}  # digits, which no template changes
_LONGEST_OPENING = 64  # tokens that surely hold a delimiter of reasoning and the blanks after it
Message = Mapping[str, Any]
_TRUSTED_ROLES = ("system", "developer", "assistant")


class ImageRenderer(Protocol):
    """Turns images of messages into tokens, as one family of models reads them. Made of a model directory."""

    def place(self, tokens: Sequence[int], images: Sequence[object]) -> tuple[int, ...]:
        """The tokens of a rendered chat, with as many tokens for each image as it has features, and the images."""
        ...

    def read(self, image: object, *, start: int) -> PlacedImage:
        """One image, whose tokens begin at `start`."""
        ...

    def alone(self, image: object) -> tuple[int, ...]:
        """The tokens that stand for one image, and nothing around them."""
        ...


class ChatTemplateError(ValueError):
    """The model's chat template does not show where an answer begins and ends."""


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A chat as text. `hidden` maps characters in it to the control tokens that messages spell out."""

    text: str
    hidden: Mapping[str, str]


class Renderer:
    """Encodes prompts, replies between two turns, and given completions, for one model."""

    def __init__(self, model: Path, max_model_len: int | None = None, *, date: datetime | None = None) -> None:
        """`model` is a Hugging Face directory with a tokenizer; `max_model_len` is the generator's context length.

        `date` is the time that a chat template sees which asks for it (`strftime_now`), the present by default. A
        renderer keeps it, so that its prompts stay the same at midnight. Raises ValueError for a tokenizer with tokens
        that the model lacks.
        """
        self._tokenizer = load_tokenizer(model)
        _check_tokens(self._tokenizer, model)
        self._text = TextEncoder(self._tokenizer)
        self._model = model
        self._date = datetime.now().astimezone() if date is None else date
        self._shown = set[tuple[str, ...]]()  # roles of messages that the template shows behind an answer
        self.max_model_len = max_model_len
        """Most tokens of a whole episode; None leaves the limit to the generator."""

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts may be chats."""
        return bool(self._tokenizer.chat_template)

    def encode(self, prompt: Prompt, tools: Sequence[Mapping[str, object]] = ()) -> tuple[int, ...]:
        """The tokens of a prompt, in which the chat template shows these tools, given as JSON schemas.

        Text begins with the tokenizer's start tokens, once. Raises ValueError for a chat if the model has no chat
        template, and for tools if the template shows none.
        """
        if isinstance(prompt, str):
            return self._text.beginning(prompt)
        chat, images = _without_images(_messages(prompt))
        shown = plain = self._encode(self._render(chat))
        if tools and (shown := self._encode(self._render(chat, tools))) == plain:
            raise ValueError(
                "the model's chat template shows no tools; ToolEnv.show_tools 'system' describes them in a message"
            )
        return self._place(shown, images)

    def encode_problem(self, problem: Problem) -> tuple[int, ...]:
        """The tokens of a problem's prompt, with its tools if it has any."""
        return self.encode(problem.prompt, given(ProblemOptions, problem).tools)

    def opening(self, tokens: Sequence[int]) -> str:
        """The delimiter of `rl.types.REASONING` with which an encoded prompt ends, apart from blanks, or "" for none.

        Templates of models that always reason open the reasoning themselves.
        """
        return opening_of(self._tokenizer, tokens)

    def encode_reply(
        self, reply: Prompt, answer_tokens: Sequence[int], earlier: Sequence[Message] = (_QUESTION,)
    ) -> tuple[int, ...]:
        """The tokens between the model's answer, which ends in `answer_tokens`, and its next answer.

        `earlier` are the messages in front of the answer. Their roles count, and not what they say.

        Messages are put through the chat template, which first closes the model's turn; the closing is left out if the
        model has closed its turn itself, with any token at which the generator stops. Text is encoded as it is, except
        for an end token that the model has sampled already. Raises ValueError as `encode` does, and
        `ChatTemplateError` for a template that does not show an earlier answer unchanged, or leaves a message out.
        """
        if isinstance(reply, str):
            tokens = self._text.continuation(reply)
            return tokens[tokens[:1] == (*answer_tokens[-1:],) and tokens[0] in self._stops :]
        messages, images = _without_images(_messages(reply))
        mark = _mark_beside(messages)
        before = [{**_role(each), "content": _QUESTION["content"]} for each in earlier]
        if before and before[-1]["role"] == "assistant":  # the answer continued it
            del before[-1]
        before.append({"role": "assistant", "content": mark})
        rendered = self._render([*before, *messages])
        if (roles := tuple(each["role"] for each in messages)) not in self._shown:
            digits = [{**each, "content": _QUESTION["content"]} for each in messages]
            after = self._behind(mark, self._render([*before, *digits]).text)
            if after.count(_QUESTION["content"]) < len(digits):
                raise ChatTemplateError(f"the chat template of {self._model} leaves messages out, of the roles {roles}")
            self._shown.add(roles)
        tokens = self._text.rendered(self._behind(mark, rendered.text), rendered.hidden, continues=True)
        return self._place(tokens[self._num_closing(tokens, answer_tokens) :], images)

    def encode_completion(self, prompt: Prompt, completion: str) -> tuple[int, ...]:
        """The tokens of a given answer to the prompt and the end token, as if the model had sampled them.

        After a chat they are the tokens with which the chat template shows the answer as the last message. So they
        begin with what the template puts between the prompt and an answer, such as a channel or an empty thought,
        unless the completion begins with that itself. They end with the token that ends a turn, if the generator stops
        at that, and otherwise with the tokenizer's `eos_token`: the two differ in Gemma 3 and Phi 3. A completion that
        ends with an end token gets no other. The answer is tokenised apart from the prompt, as in sampling.

        Raises `ChatTemplateError` as `encode_reply` does, and ValueError for a tokenizer without an end token: nothing
        would teach the model to stop.
        """
        chat = () if isinstance(prompt, str) else _without_images(_messages(prompt))[0]
        end = self._end_of_turn if chat else self._end_of_text
        if not end:
            raise ValueError("the model's tokenizer has no end token (eos_token), which a completion must end with")
        text = _led(self._lead(chat), completion) if chat else completion
        ended = self._text.continuation(text.rstrip())
        if ended and ended[-1] in self._stops:
            return ended
        if chat and ended and ended[-1] in self._closers:  # the template's, at which the generator does not stop
            return ended[:-1] + end
        return self._text.continuation(text) + end

    def read_again(self, group: Group) -> Group:
        """A recorded group, which has the files of images only, with what the model reads of them."""

        def whole(turn: Turn) -> Turn:
            images = [self._images.read(image.data, start=image.start) for image in images_of(turn.prompt_tokens)]
            return replace(turn, prompt_tokens=TokensWithImages(turn.prompt_tokens, images)) if images else turn

        rollouts = (replace(rollout, turns=tuple(map(whole, rollout.turns))) for rollout in group.rollouts)
        return replace(group, rollouts=tuple(rollouts))

    def _place(self, tokens: tuple[int, ...], images: Sequence[object]) -> tuple[int, ...]:
        return self._images.place(tokens, images) if images else tokens

    @functools.cached_property
    def _images(self) -> ImageRenderer:
        vision = vision_of(read_config(self._model))
        if vision is None:
            raise ValueError(f"the prompt has an image, and {self._model} is a model of text")
        return resolve_name(vision.renderer)(self._model)

    def _num_closing(self, tokens: Sequence[int], answer_tokens: Sequence[int]) -> int:
        """The number of tokens before a reply that close the answer, if the model has closed it itself, and else 0."""
        closing = self._closing
        last = answer_tokens[-1] if len(answer_tokens) else None
        if not closing or last not in self._control or tuple(tokens[: len(closing) - 1]) != closing[:-1]:
            return 0
        shown = tokens[len(closing) - 1]
        # Where the model has stopped with another end token than the template's, that one is left out, too. Unless it
        # is more than an end: GLM's answers end with the token that begins the next message.
        replaced = last in self._stops and shown == closing[-1] and shown in self._closers
        return len(closing) if shown == last or replaced else 0

    @functools.cached_property
    def _stops(self) -> frozenset[int]:
        """The tokens at which the generator stops."""
        return frozenset(end_token_ids(self._model, read_config(self._model))) | {*self._end_of_text}

    @functools.cached_property
    def _control(self) -> frozenset[int]:
        return self._stops | {*self._text.control_tokens, *self._tokenizer.all_special_ids}

    @property
    def _end_of_text(self) -> tuple[int, ...]:
        end = self._tokenizer.eos_token_id
        return () if end is None else (end,)

    @functools.cached_property
    def _closing(self) -> tuple[int, ...]:
        """The tokens from an answer to the first control token behind it, if that is in front of the next question."""
        after = self._behind(_MARK, self._render([_QUESTION, _ANSWER, _QUESTION]).text)
        between, found, _ = after.partition(_QUESTION["content"])
        return self._up_to_control(between if found else "")

    @functools.cached_property
    def _closers(self) -> frozenset[int]:
        """The control tokens that the template puts behind the last message of a chat."""
        asked = self._render([_QUESTION], opened=False).text.rpartition(_QUESTION["content"])[2]
        return self._control & {*self._text.continuation(asked), *self._text.continuation(self._behind_last)}

    @functools.cached_property
    def _end_of_turn(self) -> tuple[int, ...]:
        """The tokens behind the last answer, up to the one that ends it.

        A model that learned to end with a token at which the generator does not stop would never stop. An example is
        `<|im_end|>` in Qwen's base models, which have the template of the instruct models; `eos_token` ends those.
        """
        for closing in (self._up_to_control(self._behind_last), self._closing):
            if closing and closing[-1] in self._stops:
                return closing
        return self._end_of_text

    @functools.cached_property
    def _behind_last(self) -> str:
        return self._behind(_MARK, self._render([_QUESTION, _ANSWER], opened=False).text)

    def _up_to_control(self, text: str) -> tuple[int, ...]:
        """The tokens of a continuation up to the first control token, or none."""
        tokens = self._text.continuation(text)
        position = next((i for i, token in enumerate(tokens) if token in self._control), -1)
        return tokens[: position + 1]

    def _lead(self, chat: Sequence[Message]) -> str:
        """The text that the template puts between the prompt and an answer to it."""
        if chat[-1]["role"] == "assistant":  # the answer continues this message
            return ""
        before, whole = self._render(chat).text, self._render([*chat, _ANSWER], opened=False).text
        self._behind(_MARK, whole)
        return whole[len(before) : whole.index(_MARK)] if whole.startswith(before) else ""

    def _behind(self, mark: str, text: str) -> str:
        """What follows the answer in a rendered chat. Raises `ChatTemplateError` unless it is there once, unchanged."""
        _, found, after = text.partition(mark)
        if found and mark not in after:
            return after
        if found:
            fault = "shows an earlier answer more than once"
        elif mark.casefold() in text.casefold():
            fault = "changes upper and lower case in earlier answers"
        elif "".join(mark.split()) in "".join(text.split()):
            fault = "changes white space in earlier answers"
        elif mark[:20] in text:
            fault = "cuts earlier answers off, or changes characters in them"
        else:
            fault = "leaves earlier answers out, or changes them"
        raise ChatTemplateError(
            f"the chat template of {self._model} {fault}, so that nothing says where an answer ends; a template that "
            "shows earlier answers unchanged is needed here"
        )

    def _render(self, chat: Sequence[Message], tools: Sequence[Message] = (), *, opened: bool = True) -> _Rendered:
        """The chat as the template shows it. `opened` is for an answer of the model to follow."""
        if not self.has_chat_template:
            raise ValueError("the prompt is a chat, but the model has no chat template; give the prompt as one string")
        if opened and chat and chat[-1]["role"] == "assistant":
            return self._prefilled(chat, tools)
        hidden: dict[str, str] = {}
        used = _as_json([chat, tools])
        if fault := surrogate_fault(used) if chat else "has no message":
            raise ValueError(f"a chat {fault}")
        chat = as_shown(chat, self._tokenizer.get_chat_template(tools=[*tools] or None))
        messages = [
            message if message["role"] in _TRUSTED_ROLES else self._text.hide(message, hidden, used) for message in chat
        ]
        more = {"tools": self._text.hide([*tools], hidden, used)} if tools else {}
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=opened,
                strftime_now=self._date.strftime,
                **more,
            )
        except Exception as error:  # templates raise anything
            raise ValueError(f"the chat template of {self._model} refuses this chat: {error}") from error
        return _Rendered(text, hidden)

    def _prefilled(self, chat: Sequence[Message], tools: Sequence[Message]) -> _Rendered:
        """The chat up to the end of its last message, which the model continues: exactly as it is written."""
        *earlier, last = chat
        mark, said = _mark_beside(chat), text_of(last.get("content"))
        whole = self._render([*earlier, {**last, "content": mark}], tools, opened=False)
        before = whole.text[: len(whole.text) - len(self._behind(mark, whole.text)) - len(mark)]
        header = ""
        with contextlib.suppress(ValueError):  # such as for no message
            header = self._render(earlier, tools).text
        lead = before[len(header) :] if before.startswith(header) else ""
        return replace(whole, text=before[: len(before) - len(lead)] + _led(lead, said))

    def _encode(self, rendered: _Rendered) -> tuple[int, ...]:
        return self._text.rendered(rendered.text, rendered.hidden)


def _check_tokens(tokenizer: Any, model: Path) -> None:
    """Raises ValueError for tokens that the model lacks. Models of text may have those that stand for media."""
    size = read_config(model).get("vocab_size") if (model / "config.json").is_file() else None
    if not isinstance(size, int) or len(tokenizer) <= size:
        return
    media = {getattr(tokenizer, f"{kind}_token", None) for kind in ("image", "video", "audio")}
    lacking = {number: text for text, number in tokenizer.get_vocab().items() if number >= size and text not in media}
    if lacking:
        first = min(lacking)
        raise ValueError(
            f"the tokenizer in {model} has {len(lacking)} tokens that the model lacks, such as {lacking[first]!r}, "
            f"number {first}; config.json says vocab_size {size}: take the tokenizer that belongs to the weights, or "
            "weights whose embeddings were resized"
        )


def _messages(chat: Prompt) -> list[Message]:
    """The messages of a chat. Raises ValueError for what is none, and for parts that are neither text nor image."""
    given: Any = chat
    messages = (
        [dict(each) if isinstance(each, Mapping) else each for each in given] if isinstance(given, Iterable) else given
    )
    if messages != [] and (fault := prompt_fault(messages)):
        raise ValueError(f"a chat {fault}")
    return cast("list[Message]", messages)


def _mark_beside(chat: Sequence[Message]) -> str:
    """A mark that does not occur in a chat."""
    mark = _MARK
    while _as_json(mark)[1:-1] in _as_json(chat):
        mark += "'"
    return mark


def _role(message: Message) -> dict[str, object]:
    return {name: message[name] for name in ("role", "tool_call_id", "name") if name in message}


def _without_images(chat: Sequence[Message]) -> tuple[list[Message], list[object]]:
    """The messages, in whose parts the images are left out, and the images in order."""
    images = [part["image"] for message in chat for part in _parts(message) if part.get("type") == "image"]
    bare = [{**each, "content": [*map(_bare, each["content"])]} if _parts(each) else each for each in chat]
    return bare, images


def _bare(part: object) -> object:
    return {name: value for name, value in part.items() if name != "image"} if isinstance(part, Mapping) else part


def _parts(message: Message) -> Sequence[Mapping[str, object]]:
    """The parts of a message whose content is not plain text."""
    content = message.get("content")
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list | tuple) else ()


def _as_json(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def _led(lead: str, completion: str) -> str:
    """The completion after `lead`, unless it begins with the lead's first tag or white space itself."""
    tag, end, _ = lead.strip().partition(">")
    begins = completion.lstrip().startswith(tag + end) if tag else completion.startswith(lead)
    return completion if begins else lead + completion


def opening_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """See `Renderer.opening`."""
    end = str(tokenizer.decode([*tokens[-_LONGEST_OPENING:]], skip_special_tokens=False)).rstrip()
    return next((opening for opening in REASONING if end.endswith(opening)), "")


def prompt_text(prompt: Prompt) -> str:
    """The prompt as plain text for a reader: of a chat, the contents of its messages."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(_shown_text(message.get("content")) for message in prompt)


def _shown_text(content: Any) -> str:
    if not isinstance(content, list | tuple):
        return content or ""
    parts = ["[image]" if isinstance(p, Mapping) and p.get("type") == "image" else text_of([p]) for p in content]
    return ("" if "[image]" in parts else "\n").join(filter(None, parts))  # as `as_shown` has them
