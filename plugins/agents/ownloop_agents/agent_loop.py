"""GRPO over sessions of a program: run it on the tasks of a step, learn once from every token that it sampled, repeat.

Copy this page to write your own loop. It is `controller.loops.grpo` with sessions in the place of rollouts: each token
counts once, whichever branches read it, and the gradient is the mean over the step's trained tokens.
"""

from dataclasses import field

from controller.launching.launcher import launch
from controller.runs import Console, GroupLoopConfig, Loop, Run, RunFolder
from controller.runs.models import resolve_model
from ownloop_agents.endpoint import SessionLimits, agent_endpoint
from ownloop_agents.programs import as_agent_env, run_agents
from ownloop_agents.sessions import record_sessions, session_metrics, sessions_to_data
from rl.configuration import configuration
from rl.rollouts.episodes import step_seed
from rl.rollouts.evaluation import Evaluation
from rl.schedules import constant, warmup


@configuration
class AgentConfig(GroupLoopConfig):
    """A recipe of this loop. `env` is an `AgentEnv`; `sampling` replaces what its program asks for."""

    limits: SessionLimits = field(default_factory=SessionLimits)
    """What one session may use."""
    tool_parser: str = ""
    """vLLM's parser of tool calls, by its name."""
    records_routes = False
    replays = False
    evaluations = ("between",)

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        GroupLoopConfig.__post_init__(self)
        as_agent_env(self.env)
        if self.held_out:
            raise ValueError("held_out is set; this loop evaluates on its own environment alone, so leave it out")

    def loop(self) -> Loop:
        return train


async def train(config: AgentConfig, folder: RunFolder, console: Console) -> None:
    """Trains a model and reports every step. Every process it starts has ended when it returns or raises."""
    run, advantage, env = Run(config, folder, console), config.advantage_function, as_agent_env(config.env)
    model = resolve_model(config.model, run.phase)
    learning_rate = warmup(constant(config.learning_rate), config.warmup_steps)

    async def evaluate() -> Evaluation:
        groups = await run_agents(endpoint, env.program, env.eval_problems(config.num_eval), env.reward, greedy=True)
        return Evaluation(groups=tuple(group.as_group() for group in groups))

    run.phase("starting trainer and generator")
    async with (
        launch(model, config.policy_config, config.generator_config, run.log_dir, config.hosts) as (trainer, generator),
        run.steps(evaluate, policy=trainer) as steps,
        agent_endpoint(generator, config.sampling, config.limits, tool_parser=config.tool_parser) as endpoint,
    ):
        # the generator begins with the trainer's weights, also after a resume
        await generator.pull_model_state_dict(await trainer.push_model_state_dict())
        async for step in steps:
            count = config.prompts_per_step
            tasks = env.train_problems(config.seed, run.data.take(count), count)
            async with run.clock("generate"):
                size, seed = config.group_size, step_seed(config.seed, step)
                groups = await run_agents(endpoint, env.program, tasks, env.reward, num_samples=size, seed=seed)
            batch = [datum for group in groups for datum in sessions_to_data(group, advantage)]
            rollouts = [group.as_group() for group in groups]
            record_sessions(folder, step, groups)  # in the background, before the update can fail
            if batch:  # empty if no task had two different rewards
                async with run.clock("forward_backward"):
                    data, scale = config.normalised(batch)  # of all sessions
                    output = await trainer.forward_backward(data, config.loss, config.loss_config)
                async with run.clock("optim_step"):
                    update = await trainer.optim_step(config.optim(learning_rate(step - 1)), grad_scale=scale)
                async with run.clock("push"):
                    version = await trainer.push_model_state_dict()
                async with run.clock("pull"):
                    await generator.pull_model_state_dict(version)
                run.end_step(rollouts, batch, output, update, session_metrics(groups))
            else:
                run.end_step_without_update(rollouts)

        await trainer.export_hf(run.model_dir)
    run.finish()
