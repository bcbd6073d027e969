"""A small task for a program with a tool: it asks the model for a number that the model can only look up.

The program is a script of the standard library that knows OpenAI's chat completions and nothing of ownloop. The model
opens a page of a book by writing the page's number; the script answers with what is there, and the model has to write
the number that it read.
"""

import json
import sys
from dataclasses import dataclass
from random import Random

from ownloop_agents.programs import AgentTask, Attempt, Program
from ownloop_sandbox.sandboxes import SandboxName, Work

SCRIPT = r"""
import json, os, re, sys, urllib.request

def ask(chat):
    body = json.dumps({"model": "policy", "messages": chat}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

def number(text):
    return (re.findall(r"\d+", text) or [""])[0]

book = json.load(open("book.json"))
name, page = open("question.txt").read().split()
chat = [{"role": "user", "content": f"{name} is on page {page}. Which page do you open? Write its number."}]
said, answer = ask(chat), ""
opened = number(said)
if opened:
    read = book.get(opened, "it is empty")
    chat.append({"role": "assistant", "content": said})
    chat.append({"role": "user", "content": f"Page {opened}: {read}. What is the number of {name}? Write it."})
    answer = number(ask(chat))
json.dump([opened, answer], open("answer.json", "w"))
"""
_NAMES = tuple("Ada Bob Cleo Dan Eve Finn Gus Hana Ivo Jan Kim Leo Mia Noa Otto Pia".split())


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUp:
    """Names and numbers of three digits. Held-out numbers are never in the training data."""

    sandbox: SandboxName = "local"
    name: str = "look up"
    stop: tuple[str, ...] = ()

    @property
    def program(self) -> Program:
        """The script, as a program that anyone could have written."""
        # isolated: the script sees none of this environment's packages
        return Program(argv=[sys.executable, "-I", "-S", "-c", SCRIPT], sandbox=self.sandbox, time_limit_s=120.0)

    def train_problems(self, seed: int, start: int, count: int) -> list[AgentTask]:
        """Tasks with odd numbers."""
        return [_task(Random(f"look_up/{seed}/{index}"), index, odd=1) for index in range(start, start + count)]

    def eval_problems(self, count: int) -> list[AgentTask]:
        """Tasks with even numbers, always the same."""
        return [_task(Random(f"look_up/eval/{index}"), index, odd=0) for index in range(count)]

    async def reward(self, task: AgentTask, work: Work, attempt: Attempt) -> float:
        """0.5 for opening the page, and 0.5 for the number that is there. The first number of an answer counts."""
        del attempt
        # a program without an answer fails here, and the attempt with it
        found = json.loads((work / "answer.json").read_text())
        return 0.5 * sum(one == other for one, other in zip(found, task.answer, strict=True))


def _task(random: Random, index: int, *, odd: int) -> AgentTask:
    names, pages = random.sample(_NAMES, 4), random.sample(range(10, 100), 4)
    # the last bit separates training and held-out numbers
    numbers = [2 * random.randrange(50, 500) + odd for _ in names]
    book = {str(page): f"{name} {number}" for page, name, number in zip(pages, names, numbers, strict=True)}
    return AgentTask(
        id=f"{index}-{odd}",
        prompt=f"the number of {names[0]}",
        # the page is asked for, the number is behind it
        files={"book.json": json.dumps(book), "question.txt": f"{names[0]} {pages[0]}"},
        answer=[str(pages[0]), str(numbers[0])],
    )
