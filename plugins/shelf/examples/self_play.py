"""Self-play: two adapters over one model play Nim against each other, and each learns from its own side.

.venv/bin/python -m plugins.shelf.examples.self_play [STEPS]
"""

import asyncio
import random
import re
import sys
from pathlib import Path

from controller.handles.adapters import BoundGenerator
from controller.launching.launcher import Launcher
from controller.runs import resolve_model
from generator.config import GeneratorConfig, LoRALimits
from ownloop_shelf.published_advantages import RoleBaselines
from ownloop_shelf.self_play import Move, Player, Result, matches_to_data, play_matches
from rl.lora import LoRAConfig
from rl.losses import token_mean
from rl.rollouts.rendering import Renderer
from rl.types import AdamParams, SamplingParams
from trainer.config import TrainerConfig

RULES = "We take 1, 2 or 3 stones in turn. The player who takes the last stone wins. Answer with a number alone."


class Nim:
    """One match. A move against the rules loses it."""

    def __init__(self, num_stones: int) -> None:
        self.left, self.roles, self.seen = num_stones, ["first", "second"], set[str]()

    def start(self) -> Move:
        """The first player opens."""
        return self._ask()

    def reply(self, answer: str) -> Move | Result:
        """Takes the stones of the player who had to move."""
        taken = int(found[0]) if (found := re.match(r"\s*[123]\b", answer)) else 0
        player, other = self.roles
        if not 1 <= taken <= min(3, self.left):
            return Result(rewards={player: -1.0, other: 1.0} if other in self.seen else {player: -1.0})
        self.left -= taken
        if self.left == 0:
            return Result(rewards={player: 1.0, other: -1.0} if other in self.seen else {player: 1.0})
        self.roles.reverse()
        return self._ask()

    def _ask(self) -> Move:
        player = self.roles[0]
        rules = "" if player in self.seen else RULES + " "
        self.seen.add(player)
        asked = f"{rules}There are {self.left} stones. How many do you take?"
        return Move(role=player, messages=[{"role": "user", "content": asked}])


async def main(num_steps: int) -> None:
    """Prints how often each side won."""
    model = resolve_model("smollm2-135m-instruct")
    renderer, baselines = Renderer(model), RoleBaselines()
    trainer_config = TrainerConfig(compute_dtype="float32", num_threads=2, lora=LoRAConfig(rank=16))
    serving = GeneratorConfig(dtype="float32", num_threads=2, max_model_len=512, lora=LoRALimits(max_rank=16))
    async with Launcher(Path("logs")) as launcher:
        policy, generator = await asyncio.gather(
            launcher.trainer(model, trainer_config, generator=serving), launcher.generator(model, serving)
        )
        trainers = {"first": policy, "second": await policy.adapter("second", LoRAConfig(rank=16))}
        generators = {"first": generator, "second": BoundGenerator(generator, "second")}
        for role, trainer in trainers.items():
            await generators[role].pull_model_state_dict(await trainer.push_model_state_dict())
        for step in range(num_steps):
            piles = [random.Random(f"{step}/{i}").randint(3, 9) for i in range(32)]
            players = {
                role: Player(
                    generator=generators[role],
                    renderer=renderer,
                    sampling=SamplingParams(max_tokens=3, seed=2 * step << 20 | offset),
                )
                for role, offset in (("first", 0), ("second", 1 << 20))
            }
            played = await play_matches([Nim(pile) for pile in piles], players)
            whole = [rollouts for rollouts in played if not isinstance(rollouts, str)]
            won = sum(rollouts["first"].reward > 0 for rollouts in whole)
            print(f"step {step}: the first player won {won} of {len(whole)}", flush=True)
            for role, batch in matches_to_data(played, baselines).items():
                await trainers[role].forward_backward(batch, "importance_sampling")
                await trainers[role].optim_step(AdamParams(learning_rate=2e-4), grad_scale=token_mean(batch))
                await generators[role].pull_model_state_dict(await trainers[role].push_model_state_dict())


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 12))
