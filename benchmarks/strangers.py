"""The inputs of users on which ownloop was once wrong, and how many of them still are.

    python -m benchmarks.strangers [pytest's options]

Runs every test that is marked `stranger("C3")`, where C3 names one of `ENTRIES` ("2.C3" is of the second round), and
prints a line for each entry. An entry counts as wrong if a test of it fails or if it has none; the exit status is 1 if
any is wrong. About six minutes on two cores.
"""

import sys
from collections import Counter
from collections.abc import Sequence

import pytest

ENTRIES = {
    "A1": "a tied model whose files repeat the head",
    "A2": "files that contradict tie_word_embeddings",
    "A3": "other weights beside the model's",
    "A4": "rope_scaling beside rope_parameters",
    "A5": "null and absent keys of config.json",
    "A6": "chat templates in folders",
    "A7": "merging an adapter over a tied model",
    "B1": "log-probs far apart",
    "B2": "positions that are only reported",
    "B3": "a loss of the user's own",
    "B4": "rollouts of another distribution",
    "C1": "tool calls in reasoning",
    "C2": "rewards for reasoning and for what was cut off",
    "C3": "calls, results and words that nobody can read",
    "C4": "special tokens that an environment needs",
    "C5": "spellings of the boxed answer",
    "C6": "numbers of data files",
    "C7": "waiting in a queue",
    "C8": "a judge's words",
    "C9": "borders of turns",
    "C10": "start and end tokens",
    "C11": "templates that read the clock",
    "C12": "control tokens in a user's text",
    "D1": "lone surrogates",
    "D2": "held-out prompts",
    "D3": "reasoning-gym's questions",
    "D4": "sums of rewards",
    "E1": "Tinker: scoring a full context",
    "E2": "Tinker: the page's own commands",
    "E3": "Tinker: the served model's tokenizer",
    "E4": "Tinker: log-probs of a prompt's other tokens",
    "E5": "Tinker: names, metadata and numbers that are none",
    "E6": "Tinker: what is not there",
    "F1": "secrets",
    "F2": "what the sandbox separates",
    "F3": "the state of a run",
    "F4": "names, faulty files and damaged files",
    "F5": "errors of the command line, and how soon they come",
    "F6": "the report",
    "F7": "the pages",
    "F8": "progress in 80 columns",
    "2.A1": "patterns over a text of a model",
    "2.A2": "fifos, links and devices that a program left",
    "2.A3": "files of the host, read through a program's links",
    "2.A4": "work that says whether it passed",
    "2.A5": "what an agent's box separates",
    "2.A6": "Harbor's tasks as root",
    "2.A7": "the network of containers",
    "2.A8": "a Host header that opens the door",
    "2.A9": "large bodies and idle connections",
    "2.A10": "folders too deep, and claimed counts",
    "2.A11": "code in a model's folder",
    "2.B1": "an outage that is trained on",
    "2.B2": "graders that cannot run",
    "2.B3": "an MCP server that dies",
    "2.B4": "tools and results of MCP",
    "2.B5": "skipped steps",
    "2.B6": "processes that die together",
    "2.B7": "rewards that never return, forks and launches",
    "2.B8": "a judge that was cut off",
    "2.C1": "one optimizer after another",
    "2.C2": "a loss and its normaliser",
    "2.C3": "a fork's place in the data",
    "2.C4": "every row once an epoch",
    "2.C5": "random draws by one key",
    "2.C6": "an evaluation that stands alone",
    "2.C7": "a replay of a loop that samples again",
    "2.C8": "a sweep over options of several words",
    "2.C9": "steps that a logger has already",
    "2.C10": "a schedule after a longer resume",
    "2.C11": "long files of a run",
    "2.C12": "checkpoints that name foreign classes",
    "2.C13": "what Muon orthogonalises",
    "2.D1": "the token that a reward model reads",
    "2.D2": "one normalisation of a chat",
    "2.D3": "prefilled answers and numbered messages",
    "2.D4": "missing and numeric answers",
    "2.D5": "columns that nobody asked for",
    "2.D6": "transparent images",
    "2.D7": "fences of code",
    "2.D8": "a judge's numbers",
    "2.D9": "two lengths of a rope",
    "2.D10": "prompts that differ in blanks, and values too long",
    "2.D11": "check-env and its best reward",
    "2.E1": "Tinker: two writers of one model",
    "2.E2": "Tinker: temperatures",
    "2.E3": "schemas that refer to themselves",
    "2.E4": "a schema beside a reasoning parser",
    "2.E5": "parts of a message that nobody sees",
    "2.E6": "options of vLLM that change tokens",
    "2.F1": "the trace of the user's own code",
    "2.F2": "a first evaluation that fails wholly",
    "2.F3": "an adapter that is measured",
    "2.F4": "what plan leaves out",
    "2.F5": "W&B offline",
    "2.F6": "more ranks than cores",
    "2.F7": "options and words of the first steps",
    "2.F9": "inputs that are named without a point",
}
_MARKER = "stranger"


class Tally:
    """A plugin of pytest that counts outcomes by entry and prints them."""

    def __init__(self) -> None:
        self._outcomes = {entry: Counter[str]() for entry in ENTRIES}

    @property
    def wrong(self) -> list[str]:
        """Entries of which a test failed, and those of which none passed."""
        return [entry for entry, counts in self._outcomes.items() if counts["failed"] or not counts["passed"]]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a test once; a fixture that fails before or after it is a failure of its own."""
        if report.when == "call" or not report.passed:
            for name, entry in report.user_properties:
                if name == _MARKER:
                    self._outcomes[str(entry)][report.outcome] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints a line per entry, and how many are wrong."""
        for entry, what in ENTRIES.items():
            counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(self._outcomes[entry].items()))
            verdict = "WRONG" if entry in self.wrong else "right"
            terminalreporter.write_line(f"{verdict} {entry:6}{what:60} {counts or 'no test'}")
        terminalreporter.write_line(f"{len(self.wrong)} of {len(ENTRIES)} entries are wrong")


def main() -> None:
    """Runs the marked tests on two processes. Arguments go to pytest, such as `-k sandbox` or `-n 4`."""
    options = [
        "-m",
        f"{_MARKER} and not gpu",
        "-n",
        "2",
        "--dist",
        "loadfile",
        "-p",
        "benchmarks.strangers",
    ]
    tally = Tally()
    status = pytest.main([*options, *sys.argv[1:]], plugins=[tally])
    sys.exit(int(status) or bool(tally.wrong))


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Notes each test's entries in its report, which travels from the process that runs it."""
    for item in items:
        for marker in item.iter_markers(_MARKER):
            (entry,) = marker.args
            if entry not in ENTRIES:
                raise pytest.UsageError(f"{item.nodeid}: no entry {entry!r}; known: {', '.join(ENTRIES)}")
            item.user_properties.append((_MARKER, entry))


if __name__ == "__main__":
    main()
