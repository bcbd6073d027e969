"""A run's folder with everything that a report shows, written as a run writes it."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from controller.runs.folder import RunFolder
from ownloop_report.samples import TokenSamples
from rl.rollouts.episodes import group_to_data
from rl.system.timeline import TIMELINE, Timeline
from rl.types import ForwardBackwardOutput, Group, Turn
from tests.rl.fakes import completion, single_turn

NASTY = '</script><script>alert("x")</script><!-- &lt;'


def group(name: str, *answers: str, reward: float = 0.5) -> Group:
    """One rollout per answer."""
    rollouts = tuple(single_turn((1, 2), completion(text), reward=reward) for text in answers)
    return Group(problem_id=name, prompt=f"the prompt of {name}", rollouts=rollouts)


def dialogue(name: str) -> Group:
    """A rollout of two turns, with a message of the environment between them."""
    played = group(name, "first")
    second = Turn(prompt_tokens=(ord("n"), ord("o")), completion=completion("second"), prompt="no, again")
    rollout = replace(played.rollouts[0], turns=(*played.rollouts[0].turns, second))
    return replace(played, rollouts=(rollout,))


def reported_run(path: Path, num_steps: int = 20) -> RunFolder:
    """A run that is still going on: its folder is open."""
    folder = RunFolder(path, {"model": "none", "num_steps": 40, "seed": 3, "loss": "ppo"})
    timeline = Timeline(folder.path / TIMELINE)
    samples = TokenSamples(folder.path, 0)
    for step in range(num_steps + 1):
        if step % 10 == 0:
            low, high = step / 40 - 0.1, step / 40 + 0.1
            folder.log_metrics(
                {"step": step, "eval_reward": step / 40, "eval_reward_low": low, "eval_reward_high": high}
            )
            folder.log_rollouts(step, [group("a", f"eval {step}"), group("b", NASTY)], split="eval")
        if step:
            with timeline.record("controller", "generate"), timeline.record("trainer", "forward"):
                pass
            seconds = {"seconds_step": 3.0, "seconds_generate": 1.5, "seconds_push": 0.5, "seconds_engine_max": 9.0}
            memory = {"memory_peak_bytes_forward_max": 2.0**30}
            folder.log_metrics({"step": step, "reward_mean": step / 20, "loss": 1 / step, **seconds, **memory})
            folder.log_rollouts(step, [group(f"p{i}", f"{step}{i}") for i in range(4)])
    batch = group_to_data(Group(problem_id="p", prompt="", rollouts=group("p", "ab", "cd").rollouts), lambda r: r)
    logprobs = tuple(np.where(datum.weights != 0, -1.25, 0).astype(np.float32) for datum in batch)
    samples.add(num_steps, batch, ForwardBackwardOutput(logprobs=logprobs, entropy=None, metrics={}), folder.config)
    samples.write()
    timeline.write()
    folder.flush()
    return folder
