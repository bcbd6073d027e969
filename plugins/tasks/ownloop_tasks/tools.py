"""Functions as tools that a model calls in its own format, over several turns, before it answers.

    ToolEnv(env=MathProblems(...), tools=("ownloop_tasks.calculator:calculate",))

The functions' type hints and docstrings become JSON schemas, which the model's chat template shows. A message with tool
calls is answered with their results, one without is the answer, which the environment scores. A call that is malformed,
raises or takes too long is answered with the error, so that the model can learn from it. Calls in reasoning
(`rl.types.Answer`) are not made. The calls of a message run at the same time; those after the first MAX_CALLS are
answered with an error.

Calls are read in the formats of common chat templates, under the names of vLLM's parsers: `hermes` is that of Qwen2.5,
Qwen3 and Nous Hermes, `<tool_call>{"name": ..., "arguments": ...}</tool_call>`; `llama3_json` that of Llama 3, a bare
JSON object with "name" and "parameters". A test holds that well-formed calls are read as vLLM reads them. A malformed
call gets a sentence that says what is wrong, from which a model can learn.

A tool runs in a thread of this process. One that runs code of the model's belongs in a sandbox (`ownloop_sandbox`).
"""

import asyncio
import functools
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

from pydantic import Field, PositiveInt

from ownloop_tasks.around import AroundProblem
from ownloop_tasks.mcp_server import MCPServer, ServerLostError, Tool, ToolSchema
from rl.checks import are_parts, named_function
from rl.configuration import Positive, Several, configuration
from rl.protocols import (
    Done,
    Episode,
    Observation,
    Problem,
    ProblemOptions,
    Prompt,
    Reply,
    best_reward_of,
    given,
)
from rl.rollouts.chats import text_of
from rl.rollouts.guard import (
    Environment,
    EnvironmentFailedError,
    call_environment,
    time_limit_of,
    words_of,
)
from rl.types import Answer

ShowTools = Literal["template", "system"]
ToolFormat = Literal["hermes", "llama3_json"]
MAX_CALLS = 8
"""Calls of one message that run. A model that repeats itself writes many."""
MAX_DEPTH = 100
"""How deep the lists and objects of a call may nest."""
_MAX_RESULT_CHARACTERS = 4000
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_BEGUN = re.compile(r'\{\s*"')  # an object, not LaTeX
_BRACE = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)|[{}]', re.DOTALL)  # or a string, which may hold some
# A number that Python refuses to read, for its thousands of digits, is infinite, and so none that a call may hold.
_DECODER = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) < 4300 else float(digits))
_CUT_OFF = "The tool call was cut off by the limit of tokens, and not made."
# The words of Qwen2.5's chat template.
_SYSTEM = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call, or what is wrong with it."""

    name: str = ""
    arguments: dict[str, object] = field(default_factory=dict[str, object])
    fault: str = ""
    """A sentence for the model about a malformed call; empty for a well-formed one."""


@configuration
class ToolEnv:
    """A single-turn environment whose questions the model may answer with the help of tools."""

    env: Environment
    """The source of questions, whose prompts are chats, and of the reward for the last message."""
    tools: Annotated[Several[str | MCPServer], Field(min_length=1)]
    """Functions as "module:function", with type hints and a docstring that describes every argument under `Args:`; and
    servers, which bring all their tools."""
    tool_format: ToolFormat = "hermes"
    """How the model writes calls: "hermes" (Qwen2.5, Qwen3, Hermes) or "llama3_json"."""
    show_tools: ShowTools = "template"
    """How the model learns of the tools: by its chat template, or, for a template that knows no tools, by a system
    message in Hermes' format."""
    max_turns: PositiveInt = 4
    """Most messages of the model. The last one is the answer, even if it calls tools."""
    tool_time_limit_s: Positive = 10.0
    """Most seconds for one call of a tool."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        if self.show_tools == "system" and self.tool_format != "hermes":
            raise ValueError(f"ToolEnv.tool_format is {self.tool_format!r}; show_tools 'system' needs 'hermes'")
        _check_names([_tool(path) for path in self.tools if isinstance(path, str)])

    @property
    def name(self) -> str:
        """The environment's name, and the tools' names."""
        names = (t.partition(":")[2] if isinstance(t, str) else " ".join(t.command) for t in self.tools)
        return f"{self.env.name} with {', '.join(names)}"

    @property
    def stop(self) -> tuple[str, ...]:
        """The environment's stop strings."""
        return self.env.stop

    @property
    def best_reward(self) -> float:
        """The environment's, whose reward is that of the episode."""
        return best_reward_of(self.env)

    @property
    def call_time_limit_s(self) -> float:
        """See `rl.protocols.Env`. A message may hold several calls, which run at the same time."""
        return time_limit_of(self.env) + self.tool_time_limit_s

    def train_problems(self, seed: int, start: int, count: int) -> list["ToolProblem"]:
        """The environment's, with tools."""
        return [self._with_tools(problem) for problem in self.env.train_problems(seed, start, count)]

    def eval_problems(self, count: int) -> list["ToolProblem"]:
        """The environment's, with tools."""
        return [self._with_tools(problem) for problem in self.env.eval_problems(count)]

    def _with_tools(self, problem: Problem) -> "ToolProblem":
        """Raises ValueError for a prompt that is no chat."""
        prompt = problem.prompt
        if isinstance(prompt, str):
            raise ValueError(f"{self.env.name} has prompts of text; ToolEnv.env needs prompts that are chats")
        schemas = tuple(schema for schema, _ in find_tools(self.tools))
        if self.show_tools == "system":
            text = _SYSTEM.format(tools="\n".join(json.dumps(schema) for schema in schemas))
            has_system = prompt[0]["role"] == "system"
            text = f"{text_of(prompt[0]['content'])}\n\n{text}" if has_system else text
            prompt, schemas = [{"role": "system", "content": text}, *prompt[has_system:]], ()
        return ToolProblem(problem=problem, prompt=prompt, tools=schemas, settings=self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolProblem(AroundProblem):
    """A question of the environment."""

    problem: Problem
    prompt: Prompt
    tools: Sequence[ToolSchema]
    """JSON schemas for the chat template; see `rl.protocols.Problem`."""
    settings: ToolEnv

    @property
    def id(self) -> str:
        """The question's id."""
        return self.problem.id

    @property
    def best_reward(self) -> float:
        """The question's own, of a mixture's task, or the environment's."""
        own = given(ProblemOptions, self.problem).best_reward
        return self.settings.best_reward if own is None else own

    async def start(self) -> "ToolEpisode":
        """Starts the environment's own episode."""
        limit_s = time_limit_of(self.settings.env)
        return ToolEpisode(self.settings, await call_environment(self.problem.start, time_limit_s=limit_s))


class ToolEpisode:
    """One attempt at a question."""

    def __init__(self, settings: ToolEnv, episode: Episode) -> None:
        """`episode` has just been started."""
        self._settings = settings
        self._episode = episode
        self._functions = {schema["function"]["name"]: f for schema, f in find_tools(settings.tools)}
        self._num_turns = self._num_calls = self._num_errors = 0

    async def reply(self, completion: str) -> Reply:
        """The tools' results, or the environment's reward.

        Raises TypeError if the environment asks for another turn itself.
        """
        self._num_turns += 1
        answer = Answer.read(completion)
        calls = parse_tool_calls(answer.content, self._settings.tool_format, is_cut_off=answer.is_cut_off)
        if calls and self._num_turns < self._settings.max_turns:
            too_many = ToolCall(fault=f"A message may hold {MAX_CALLS} tool calls. This one was not made.")
            calls[MAX_CALLS:] = [too_many] * (len(calls) - MAX_CALLS)
            results = await asyncio.gather(*map(self._result, calls))
            return Observation(messages=[{"role": "tool", "content": result} for result in results])
        limit_s = time_limit_of(self._settings.env)
        done = await call_environment(self._episode.reply, answer, time_limit_s=limit_s)
        if not isinstance(done, Done):
            raise TypeError(f"{self._settings.env.name} asks for several turns; ToolEnv.env needs single-turn problems")
        return Done(
            reward=done.reward,
            metrics={
                **done.metrics,
                "tool_calls": float(self._num_calls),
                "tool_errors": float(self._num_errors),
            },
        )

    async def _result(self, call: ToolCall) -> Any:
        """What the tool returns, as text or as parts of a message, or what went wrong."""
        self._num_calls += 1
        fault = call.fault or self._fault(call)
        if not fault:
            function = functools.partial(self._functions[call.name], **call.arguments)
            try:
                value = await call_environment(function, time_limit_s=self._settings.tool_time_limit_s)
                return value if are_parts(value) and any("image" in part for part in value) else _in_words(value)
            except EnvironmentFailedError as error:
                if isinstance(error.__cause__, ServerLostError):
                    raise
                fault = str(error)
        self._num_errors += 1
        return _readable(f"Error: {fault}")

    def _fault(self, call: ToolCall) -> str:
        """What is wrong with a call, in words for the model."""
        if call.name not in self._functions:
            return f"There is no tool {call.name!r}; there is {', '.join(map(repr, self._functions))}."
        try:
            inspect.signature(self._functions[call.name]).bind(**call.arguments)
        except TypeError as error:
            return f"{call.name}: {error}"
        return ""


def _in_words(value: object) -> str:
    """What a tool returned, as text. Raises `EnvironmentFailedError` for what is no JSON."""
    try:
        return _readable(value if isinstance(value, str) else json.dumps(value, default=str))
    except Exception as error:  # the methods of the value may raise anything
        kind = type(value).__name__
        raise EnvironmentFailedError(f"it returned a {kind}, which is no JSON: {words_of(error)}") from error


def _readable(text: str) -> str:
    """The first characters of a text, each of which a tokenizer can read: halves of surrogate pairs become "?"."""
    return text[:_MAX_RESULT_CHARACTERS].encode(errors="replace").decode()


def find_tools(tools: Sequence[str | MCPServer]) -> list[Tool]:
    """All functions, and all tools of the servers, which are started if need be. Raises ValueError as they do."""
    found = [each for tool in tools for each in ((_tool(tool),) if isinstance(tool, str) else tool.tools())]
    _check_names(found)
    return found


def _check_names(tools: Sequence[Tool]) -> None:
    names = [schema["function"]["name"] for schema, _ in tools]
    if len(set(names)) < len(names):
        raise ValueError(f"ToolEnv.tools has two functions of one name: {', '.join(names)}")


@functools.cache
def _tool(path: str) -> Tool:
    """The JSON schema and the function. Raises ValueError if it cannot be imported or has no schema."""
    from transformers.utils.chat_template_utils import get_json_schema  # a second, which `--help` should not take

    try:
        function = named_function("it", path)
        return ToolSchema(type="function", function=get_json_schema(function)["function"]), function
    except Exception as error:  # of the import, or of the docstring
        raise ValueError(f"ToolEnv.tools holds {path!r}, which cannot be a tool: {error}") from error


def parse_tool_calls(text: str, tool_format: ToolFormat, *, is_cut_off: bool = False) -> list[ToolCall]:
    """All calls in the text, in order; empty if the model called no tool. A call that is cut off is malformed.

    Arguments nest at most `MAX_DEPTH` deep and hold what JSON can hold: no NaN, no infinity, no half of a surrogate.
    """
    return _PARSERS[tool_format](text, is_cut_off)


def _parse_hermes(text: str, is_cut_off: bool) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for found in _HERMES.finditer(text):
        if is_cut_off and not found[0].endswith("</tool_call>"):
            calls.append(ToolCall(fault=_CUT_OFF))
            continue
        try:
            calls.append(_call(_DECODER.decode(found[1])))
        except (ValueError, RecursionError) as error:
            calls.append(ToolCall(fault=f"The tool call is not valid JSON: {error}"))
    return calls


def _parse_llama3_json(text: str, is_cut_off: bool) -> list[ToolCall]:
    """Objects without a name are part of the text: answers may hold JSON or LaTeX."""
    calls: list[ToolCall] = []
    end = whole = 0  # objects that begin before `whole` are not cut off
    left = 20 * len(text)  # characters to read in vain
    while left >= 0 and (begun := _BEGUN.search(text, end)) is not None:
        start = begun.start()
        try:
            value, end = _DECODER.raw_decode(text, start)
        except RecursionError as error:
            return [*calls, ToolCall(fault=f"The tool call is not valid JSON: {error}")]
        except json.JSONDecodeError as error:
            if is_cut_off and start >= whole:
                whole = _end_of_object(text, start)
                if whole < 0:  # objects within it must not be taken for calls of their own
                    return [*calls, ToolCall(fault=_CUT_OFF)] if text.find('"name"', start) >= 0 else calls
            # The error counts the lines before its place, at some 64 characters a step.
            end, left = start + 1, left - (error.pos - start) - error.pos // 64
            continue
        if "name" in value and ("parameters" in value or "arguments" in value):
            calls.append(_call(value))
    return calls


def _end_of_object(text: str, start: int) -> int:
    """Where the object that begins at `start` ends; -1 if it has no end."""
    depth = 0
    for found in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.end()
    return -1


def _call(value: object) -> ToolCall:
    """The call that a JSON value stands for."""
    fields = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    name, arguments = fields.get("name"), fields.get("arguments", fields.get("parameters"))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(fault='A tool call needs a "name" and "arguments", which are an object.')
    try:
        # A tool server must be able to read them again.
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        return ToolCall(fault=f"The tool call is not valid JSON: {_sentence(error)}")
    if _is_deeper(fields, MAX_DEPTH):
        return ToolCall(fault=f"The tool call is nested more than {MAX_DEPTH} deep.")
    return ToolCall(name=name, arguments=cast("dict[str, object]", arguments))


def _sentence(error: Exception) -> str:
    return "it holds half of a surrogate pair" if isinstance(error, UnicodeError) else str(error)


def _is_deeper(value: object, depth: int) -> bool:
    """Whether lists and objects nest more than `depth` deep."""
    if not isinstance(value, dict | list):
        return False
    inner = cast("list[object]", [*value.values()] if isinstance(value, dict) else value)
    return depth == 0 or any(_is_deeper(each, depth - 1) for each in inner)


_PARSERS: dict[ToolFormat, Callable[[str, bool], list[ToolCall]]] = {
    "hermes": _parse_hermes,
    "llama3_json": _parse_llama3_json,
}
