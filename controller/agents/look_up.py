"""A small task for a program with a tool: it asks the model for a number that the model can only look up.

The program is a script of the standard library that knows OpenAI's chat completions and nothing of ownloop. The model
looks a name up by writing `LOOK name`; the script answers with the number, and the model has to write it.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random

from controller.agents.programs import AgentTask, Attempt, Program
from controller.agents.sandboxes import SandboxName

SCRIPT = r"""
import json, os, re, sys, urllib.request

def ask(chat):
    body = json.dumps({"model": "policy", "messages": chat}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

book, name = json.load(open("book.json")), open("name.txt").read()
chat = [{"role": "user", "content": f"Find the number of {name}. Write LOOK {name} to look it up."}]
for turn in range(2):
    said = ask(chat)
    found = re.search(r"LOOK (\w+)", said)
    if found is None:
        break
    number = book.get(found[1], "unknown")
    chat.append({"role": "assistant", "content": said})
    chat.append({"role": "user", "content": f"{number}. Now write the number only."})
open("answer.txt", "w").write(said)
open("looked.txt", "w").write(str(len(chat) > 1))
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
        return Program(argv=[sys.executable, "-I", "-S", "-c", SCRIPT], sandbox=self.sandbox, time_limit_s=120.0)

    def train_problems(self, seed: int, start: int, count: int) -> list[AgentTask]:
        """Tasks with odd numbers."""
        return [_task(Random(f"{seed}/{index}"), index, odd=1) for index in range(start, start + count)]

    def eval_problems(self, count: int) -> list[AgentTask]:
        """Tasks with even numbers, always the same."""
        return [_task(Random(f"eval/{index}"), index, odd=0) for index in range(count)]

    async def reward(self, task: AgentTask, work: Path, attempt: Attempt) -> float:
        """0.5 for a look-up, and 0.5 for an answer that is the number and nothing else."""
        del attempt
        looked = (work / "looked.txt").read_text() == "True"
        return 0.5 * looked + 0.5 * ((work / "answer.txt").read_text().strip().rstrip(".") == task.answer)


def _task(random: Random, index: int, *, odd: int) -> AgentTask:
    names = random.sample(_NAMES, 4)
    book = {name: 2 * random.randrange(50, 500) + odd for name in names}
    listed = ", ".join(f'"{name}": {number}' for name, number in book.items())
    files = {"book.json": f"{{{listed}}}", "name.txt": names[0]}
    return AgentTask(id=f"{index}-{odd}", prompt=f"the number of {names[0]}", files=files, answer=str(book[names[0]]))
