"""One trajectory before the run, which can change nothing: only tools that are read-only are offered."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mcp_grpo.doctor.findings import Findings
from mcp_grpo.doctor.machine import Machine
from mcp_grpo.doctor.model import ModelParts
from mcp_grpo.doctor.servers import harmless_tools
from mcp_grpo.errors import RolloutError, TemplateError
from mcp_grpo.precision import suited_to_cpu
from mcp_grpo.rollout import Limits, Renderer, RolloutEngine, derived_seed
from mcp_grpo.rollout.replay import ScriptedGenerator, call_message
from mcp_grpo.sampling.transformers_generator import TransformersGenerator
from mcp_grpo.types import Task, Trajectory


MAX_TOKENS = 128  # of a turn of the real model
MAX_SMALL = 1_000_000_000  # weights of a model that is run without a GPU
SEED = 0


def run_dry(
    findings: Findings,
    parts: ModelParts,
    engine: RolloutEngine,
    tasks: Sequence[Task],
    *,
    weights: str | None,
    machine: Machine,
) -> None:
    """Attempt one task: with the model, if its weights are here and can be run, or by a script that calls a harmless tool."""
    renderer = parts.renderer
    assert renderer is not None
    task = _harmless_task(tasks, engine)
    is_runnable = weights is not None and parts.is_real and _is_runnable(parts, machine)
    if is_runnable:
        trajectory, who = _with_model(engine, renderer, task, str(weights), parts), "the model"
    else:
        try:
            trajectory, who = _by_script(engine, renderer, task), "a script in place of the model"
        except TemplateError as error:  # a policy may begin its turns otherwise
            findings.skip(
                "dry trajectory", f"the weights are not here, and no turn could be written for them: {error}"
            )
            return
    if trajectory.is_failed:
        raise RolloutError(f"The attempt failed: {trajectory.error or trajectory.stop_reason.value}.")
    tokens = len(trajectory.completion_ids)
    answered = sum(not exchange.result.is_error for exchange in trajectory.exchanges)
    calls = (
        f"{answered} of {len(trajectory.exchanges)} calls answered" if trajectory.exchanges else "no tool was called"
    )
    findings.ok(
        "dry trajectory",
        f"task {task.task_id!r} by {who}: {len(trajectory.prompt_ids)} tokens of prompt, {tokens} after it, "
        f"{trajectory.num_turns} turns; {calls}",
    )


def _harmless_task(tasks: Sequence[Task], engine: RolloutEngine) -> Task:
    """Return the first task, with read-only tools alone and nothing set up; other columns stay, as a server may be made by them."""
    first = (
        tasks[0] if tasks else Task(task_id="none", prompt=({"role": "user", "content": "Which tools are there?"},))
    )
    names = tuple(tool.name for tool in engine.catalog.tools if tool.is_read_only)
    columns = {name: value for name, value in first.metadata.items() if name != "setup"}
    return replace(first, servers=None, tools=names, user_turns=(), metadata=columns)


def _is_runnable(parts: ModelParts, machine: Machine) -> bool:
    if machine.gpu is not None:
        return True
    if parts.config is None:
        return False
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(parts.config).num_parameters() <= MAX_SMALL


def _with_model(engine: RolloutEngine, renderer: Renderer, task: Task, weights: str, parts: ModelParts) -> Trajectory:
    model: Any = AutoModelForCausalLM.from_pretrained(weights, dtype="auto")
    model = model.to("cuda") if torch.cuda.is_available() else suited_to_cpu(model)
    tokenizer = renderer.tokenizer
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    generator = TransformersGenerator(model.eval(), end_of_turn_ids=renderer.end_of_turn_ids, pad_token_id=pad)
    context = getattr(parts.config.get_text_config(), "max_position_embeddings", None) if parts.config else None
    limits = Limits(
        max_turns=2,
        max_completion_length=8 * MAX_TOKENS,
        max_context=context,
        max_turn_tokens=MAX_TOKENS,
        max_result_tokens=4 * MAX_TOKENS,
    )
    (found,) = engine.roll_out([task], renderer=renderer, generator=generator, limits=limits, seed=SEED)
    return found


def _by_script(engine: RolloutEngine, renderer: Renderer, task: Task) -> Trajectory:
    """Write the turns that a policy would: a call of a harmless tool, if there is one, and an answer."""
    tools = harmless_tools(engine.catalog.tools_for(task), engine.configs)[:1]
    calls = [call_message({"calls": [{"name": tool.name, "arguments": {}}]}) for tool in tools]
    turns = [renderer.turn_ids(message) for message in (*calls, {"role": "assistant", "content": "Done."})]
    limits = Limits(max_turns=len(turns), max_completion_length=100_000, max_result_tokens=4 * MAX_TOKENS)
    generator = ScriptedGenerator({derived_seed(SEED, 0): turns})
    (found,) = engine.roll_out([task], renderer=renderer, generator=generator, limits=limits, seed=SEED)
    return found
