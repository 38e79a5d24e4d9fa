"""The limits of a run beside the scripted solutions of its tasks: what these do not allow, no policy can learn."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice, zip_longest

from mcp_grpo.build import make_limits
from mcp_grpo.config import MCPGRPOConfig
from mcp_grpo.doctor.findings import Findings, counted
from mcp_grpo.doctor.model import ModelParts
from mcp_grpo.doctor.servers import read_only_tools
from mcp_grpo.errors import TemplateError
from mcp_grpo.rollout import Renderer, RolloutEngine, derived_seed
from mcp_grpo.rollout.replay import COLUMN, ScriptedGenerator, call_message, rounds_of, why_unfit
from mcp_grpo.types import Task, Trajectory


NUM_TRIED = 32
SEED = 0


def examine_limits(
    findings: Findings, parts: ModelParts, engine: RolloutEngine, tasks: Sequence[Task], config: MCPGRPOConfig
) -> None:
    """Run some solutions up to the first call that may change something, and say which do not fit into the limits of the run."""
    renderer = parts.renderer
    assert renderer is not None
    tried = spread([task for task in tasks if task.metadata.get(COLUMN) is not None])
    if not tried or parts.config is None:
        return
    if not parts.is_real:
        findings.leave("limits", "solutions have other lengths in tokens of bytes")
        return
    limits = make_limits(config, parts.config, config.vllm_max_model_length if config.use_vllm else None)
    try:
        scripts = [_harmless(task, engine, renderer) for task in tried]
    except TemplateError as error:  # as of the dry trajectory
        findings.skip("limits", f"no turn of a solution could be written: {error}")
        return
    turns = {derived_seed(SEED, index): turns for index, (_, turns) in enumerate(scripts)}
    found = engine.roll_out(
        [task for task, _ in scripts],
        renderer=renderer,
        generator=ScriptedGenerator(turns),
        limits=limits,
        seed=SEED,
    )
    unfit = defaultdict[str, list[Trajectory]](list)
    for trajectory in found:
        # What fails is told elsewhere, and without its last calls a solution may not solve its task.
        if not trajectory.is_failed and (problem := why_unfit(trajectory, lambda _: True)):
            unfit[problem].append(trajectory)
    if not unfit:
        findings.ok("limits", f"{counted(len(found), 'solution')} that were tried fit into them")
        return
    reasons = "; ".join(f"{len(each)} because {problem} ({_families(each)})" for problem, each in unfit.items())
    number = sum(map(len, unfit.values()))
    findings.warn(
        "limits",
        f"{number} of {counted(len(found), 'solution')} that were tried do not fit into them: {reasons}",
        "Raise the setting, or leave these tasks out: the policy may never solve them.",
    )


def spread(tasks: Sequence[Task], number: int = NUM_TRIED) -> list[Task]:
    """Return some of the tasks, of all families in turn where they tell their family."""
    families = defaultdict[str, list[Task]](list)
    for task in tasks:
        families[str(task.metadata.get("family"))].append(task)
    rounds = chain.from_iterable(zip_longest(*families.values()))
    return list(islice((task for task in rounds if task is not None), number))


def _harmless(task: Task, engine: RolloutEngine, renderer: Renderer) -> tuple[Task, list[tuple[int, ...]]]:
    """Return a task with read-only tools alone, and the turns of its solution up to where others are called."""
    script = rounds_of(task)[0]
    names = {tool.name for tool in read_only_tools(engine.catalog.tools_for(task), engine.configs)}
    steps = []
    for step in script["steps"]:
        if not all(call["name"] in names for call in step["calls"]):
            break
        steps.append(call_message(step))
    turns = [renderer.turn_ids(message) for message in (*steps, {"role": "assistant", "content": script["final"]})]
    columns = {name: value for name, value in task.metadata.items() if name != "setup"}
    return replace(task, servers=None, tools=tuple(sorted(names)), user_turns=(), metadata=columns), turns


def _families(trajectories: Sequence[Trajectory]) -> str:
    names = sorted({str(each.task.metadata.get("family") or each.task.task_id) for each in trajectories})
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
