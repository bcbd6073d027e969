"""Sessions: the model calls of one episode of a program, as a tree; and the tree as training data.

    call 0 (root) ---- call 1 (extends 0) ---- call 2 (spliced onto 1)
                 \\---- call 3 (extends 0)                                a retry, or an edited message
    call 4 (root)                                                        a sub-agent, or a compacted history

A path from a root to a leaf is one sequence that the model read and sampled: a `Rollout`. Every token was sampled once,
so it is trained once: in the first leaf that it leads to. Other leaves only read it, and the trainer computes what
leaves share once (`rl.data.packing`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from controller.runs.folder import SESSIONS, RunFolder
from controller.runs.recording import kind_of, recording_of
from ownloop_agents.splicing import EarlierCall, How
from rl.checks import check_known
from rl.rollouts.columns import groups_to_table, parquet_bytes
from rl.rollouts.episodes import rollout_to_datum
from rl.system.disk import write_whole
from rl.types import Datum, Group, Rollout, SamplingParams, Turn

Credit = Literal["all", "last", "per_branch"]
"""Which branches a session's advantage is for: all; only the last one, which ends with the newest call; or all, each
divided by the number of branches, so that a session with many branches counts as much as one with a single branch."""
EndedBy = Literal["exit", "time_limit", "idle_limit", "call_limit", "token_limit", "own_limit"]
"""What ended a program: itself; a limit of `Program` or `SessionLimits`; or a limit of its own, such as a number of
turns, which its reward says."""
CREDITS: tuple[Credit, ...] = ("all", "last", "per_branch")
_OF_CALLS = {
    "parent": pa.int32(),
    **dict.fromkeys(("how", "dialect", "label"), pa.string()),
    **dict.fromkeys(("constrained", "delivered"), pa.bool_()),
    "seconds": pa.float64(),
}
_OF_SESSIONS = {"id": pa.string(), "ended_by": pa.string(), "exit_code": pa.int32(), "output": pa.string()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One finished request of a program."""

    turn: Turn
    """What was read after the parent's tokens, and the completion."""
    parent: int | None
    """Index of the call that the prompt begins with; None for a root."""
    how: How
    digest: str
    dialect: str = "chat/completions"
    label: str = ""
    """Who asks, as the program's own headers say: a sub-agent's name."""
    constrained: bool = False
    """Whether the program forced a form of the answer. Such tokens are read and not trained."""
    delivered: bool = True
    """Whether the program got the whole answer. If it did not, it asked again, or was cut off."""
    seconds: float = 0.0

    def as_earlier(self) -> EarlierCall:
        """The part of the call that later requests need."""
        tokens = (*self.turn.prompt_tokens, *self.turn.completion.tokens)
        return EarlierCall(self.parent, np.array(tokens, dtype=np.int32), self.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One episode of a program with its reward."""

    id: str
    calls: tuple[ModelCall, ...]
    """In the order in which they finished; a parent comes before its children."""
    sampling: SamplingParams
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    ended_by: EndedBy = "exit"
    exit_code: int | None = None
    output: str = ""
    """The end of what the program printed."""
    seconds: float = 0.0

    @property
    def limited(self) -> bool:
        """Whether a limit ended the program."""
        return self.ended_by != "exit"

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens of all calls that are trained."""
        return sum(len(self.calls[index].turn.completion.tokens) for index in trained_calls(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionGroup:
    """All episodes of one task."""

    task_id: str
    prompt: str
    """The task in words, for a reader."""
    sessions: tuple[Session, ...]
    failures: tuple[str, ...] = ()
    """A sentence for each episode that has no reward."""

    @property
    def rewards(self) -> NDArray[np.float64]:
        """[S] the rewards."""
        return np.array([session.reward for session in self.sessions], dtype=np.float64)

    def as_group(self) -> Group:
        """The group with the last branch of each session as its rollout, for metrics and recordings of rollouts."""
        rollouts = [last_branch(session) for session in self.sessions]
        return Group(problem_id=self.task_id, prompt=self.prompt, rollouts=tuple(rollouts), failures=self.failures)


def kept_calls(session: Session) -> list[int]:
    """The calls whose answers a program has read: they were delivered whole, or a kept call continues them."""
    kept: set[int] = set()
    for index in reversed(range(len(session.calls))):  # children come after their parents, so they decide first
        call = session.calls[index]
        if call.delivered or index in kept:
            kept.add(index)
            if call.parent is not None:
                kept.add(call.parent)  # its answer was read, since a later request repeats it
    return sorted(kept)


def branches(session: Session) -> list[tuple[int, ...]]:
    """The paths from a root to a leaf, as indices of calls, in the order of their leaves."""
    kept = kept_calls(session)
    parents = {session.calls[index].parent for index in kept}  # a call that another continues is no leaf
    return [_path(session, index) for index in kept if index not in parents]


def trained_calls(session: Session) -> list[int]:
    """The calls whose tokens count: kept, and sampled from the distribution that is trained."""
    return [index for index in kept_calls(session) if not session.calls[index].constrained]


def last_branch(session: Session) -> Rollout:
    """The branch that ends with the newest call, with the session's reward. Raises ValueError without a call."""
    paths = branches(session)
    if not paths:
        raise ValueError(f"session {session.id!r} has no finished call; a rollout needs one")
    return _rollout(session, paths[-1])


def session_to_data(session: Session, advantage: float, *, credit: Credit = "all") -> list[Datum]:
    """One Datum for each branch that trains a token. A token that several branches share counts in the first of them.

    Calls that were not delivered or were constrained count nowhere; see `trained_calls`. Raises ValueError for an
    unknown `credit`, and as `rollout_to_datum` does.
    """
    check_known("credit", credit, CREDITS)
    paths = branches(session)
    counted = set(range(len(session.calls))) - set(trained_calls(session))  # what is never trained counts as counted
    data: list[Datum] = []
    for path in paths[-1:] if credit == "last" else paths:
        # so that a session's weight does not grow with its branches
        value = advantage / len(paths) if credit == "per_branch" else advantage
        datum = _without(rollout_to_datum(_rollout(session, path), value), session, path, counted)
        counted.update(path)
        if datum.num_loss_tokens:
            data.append(datum)  # nothing in it is trained
    return data


def sessions_to_data(
    group: SessionGroup,
    advantage: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    credit: Credit = "all",
) -> list[Datum]:
    """The data of all sessions of a task, with advantages from their rewards.

    Empty if all advantages are 0, and if failures have left fewer than two sessions.
    """
    # a lone attempt has nothing to be compared with
    if not group.sessions or (group.failures and len(group.sessions) < 2):
        return []
    advantages = advantage(group.rewards)
    if not advantages.any():  # all attempts did equally well
        return []
    pairs = zip(group.sessions, advantages, strict=True)
    return [datum for session, value in pairs for datum in session_to_data(session, float(value), credit=credit)]


def session_metrics(groups: Sequence[SessionGroup]) -> dict[str, float]:
    """Means over the sessions of a step: calls, roots, branches, sampled tokens, prompts by how they came about."""
    sessions = [session for group in groups for session in group.sessions]
    if not sessions:
        return {}
    calls = [call for session in sessions for call in session.calls]
    # all four, so that a step without one reports 0
    hows: dict[How, int] = {"root": 0, "extends": 0, "spliced": 0, "rewritten": 0}
    for call in calls:
        hows[call.how] += 1
    num = len(sessions)
    return {
        "session_calls": len(calls) / num,
        "session_branches": sum(len(branches(session)) for session in sessions) / num,
        "session_tokens": sum(session.num_sampled_tokens for session in sessions) / num,
        "session_seconds": sum(session.seconds for session in sessions) / num,
        "sessions_limited": sum(session.limited for session in sessions) / num,
        "calls_undelivered": sum(not call.delivered for call in calls) / num,
        **{f"calls_{how}": count / num for how, count in hows.items()},
    }


def record_sessions(folder: RunFolder, step: int, groups: Sequence[SessionGroup], *, split: str = "train") -> None:
    """Writes the sessions of a step or an evaluation in the background, to `sessions/step-00012.parquet`.

    A row is a session, in the columns of recorded rollouts, with all calls as its turns. Further columns are lists with
    an entry for each call, as the fields of `ModelCall` say, and `ended_by`, `exit_code` and `output`.
    """
    file = recording_of(folder.path / SESSIONS, step, kind_of(split))
    folder.in_background(partial(_write, file, tuple(groups)))


def _write(file: Path, groups: Sequence[SessionGroup]) -> None:
    played = [
        Group(
            problem_id=group.task_id,
            prompt=group.prompt,
            # all calls in their order, not along branches
            rollouts=tuple(_rollout(session, range(len(session.calls))) for session in group.sessions),
            failures=group.failures,
        )
        for group in groups
    ]
    table = groups_to_table(played)
    sessions = [session for group in groups for session in group.sessions]
    for name, kind in _OF_CALLS.items():
        # a list for each session, one entry per call
        lists = [[getattr(call, name) for call in session.calls] for session in sessions]
        table = table.append_column(name, pa.array(lists, pa.list_(kind)))
    trained = [[index in trained_calls(session) for index in range(len(session.calls))] for session in sessions]
    table = table.append_column("trained", pa.array(trained, pa.list_(pa.bool_())))
    for name, kind in _OF_SESSIONS.items():
        table = table.append_column(name, pa.array([getattr(session, name) for session in sessions], kind))
    if table.num_rows:  # a step without sessions leaves no file
        write_whole(file, parquet_bytes(table))


def _path(session: Session, leaf: int) -> tuple[int, ...]:
    path: list[int] = []
    place: int | None = leaf
    while place is not None:
        path.append(place)
        place = session.calls[place].parent
    return tuple(path[::-1])  # from the root on


def _rollout(session: Session, path: Sequence[int]) -> Rollout:
    return Rollout(
        turns=tuple(session.calls[index].turn for index in path),
        reward=session.reward,
        metrics=session.metrics,
        out_of_context=session.limited,
        environment_s=session.seconds,
        sampling=session.sampling,
    )


def _without(datum: Datum, session: Session, path: Sequence[int], counted: set[int]) -> Datum:
    """The datum with weight 0 for the tokens of calls that are in `counted`."""
    weights, place = datum.weights.copy(), -1  # the target of position t is token t + 1
    for index in path:
        turn = session.calls[index].turn
        place += len(turn.prompt_tokens)
        end = place + len(turn.completion.tokens)
        if index in counted:
            weights[place:end] = 0.0  # read and not trained
        place = end
    return replace(datum, loss_inputs={**datum.loss_inputs, "weights": weights})
