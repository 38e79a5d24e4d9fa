"""The model: its tokenizer, its chat template, the tags it writes, and the length of prompts."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

from transformers import GenerationConfig, PretrainedConfig

from mcp_grpo.build import make_limits
from mcp_grpo.config import MCPGRPOConfig
from mcp_grpo.doctor.findings import Findings
from mcp_grpo.doctor.stand_in import STAND_IN, config_of, tokenizer_of
from mcp_grpo.rollout import Renderer, RolloutEngine, output_rows, set_call_format
from mcp_grpo.rollout.engine import room_problem
from mcp_grpo.types import Task


CHARACTERS_PER_TOKEN = 3.6  # of the desk's prompts with Qwen3's tokenizer, rounded down


@dataclass(kw_only=True)
class ModelParts:
    """The parts of a model that are on this machine, without its weights."""

    tokenizer: Any = None
    is_real: bool = False  # not a stand-in of bytes
    config: PretrainedConfig | None = None
    renderer: Renderer | None = None
    prompt_tokens: int = 0


def examine_model(findings: Findings, model: Any, config: MCPGRPOConfig) -> ModelParts:
    """Read the tokenizer and the chat template of a model."""
    name, revision = str(model.model_name_or_path), model.model_revision
    parts = ModelParts(config=config_of(name, revision))
    found = findings.run(
        "tokenizer",
        lambda: tokenizer_of(name, revision),
        remedy=f"Fetch it: `hf download {name}`, or correct the name.",
    )
    if found is None:
        return parts
    parts.tokenizer, parts.is_real = found
    if not parts.is_real:
        findings.leave("tokenizer", f"that of {name} is not on this machine; Qwen3's chat template on bytes instead")
    parts.renderer = findings.run(
        "chat template",
        lambda: _examine_template(findings, parts, name, revision, config),
        remedy='Set `call_format="json"`, or use a model whose chat template knows tools and keeps what was said.',
    )
    return parts


def examine_prompts(
    findings: Findings, parts: ModelParts, config: MCPGRPOConfig, engine: RolloutEngine, tasks: Sequence[Task]
) -> None:
    """Check tools and follow-up messages against the template, and prompts against the context."""
    renderer = parts.renderer
    if renderer is None:
        return
    findings.run(
        "descriptions",
        lambda: renderer.check_tools([tool.schema for tool in engine.catalog.tools]),
        remedy="Exclude the tool with `allowed_tools`.",
    )
    if any(task.user_turns for task in tasks):
        findings.run(
            "user turns",
            lambda: (renderer.check_user_turns(), findings.ok("user turns", "may follow an answer")),
            remedy="Leave `user_turns` out, or use another chat template.",
        )
    findings.run("prompts", lambda: _examine_lengths(findings, parts, config, engine, tasks), needs=("tools",))


def _examine_template(
    findings: Findings, parts: ModelParts, name: str, revision: str, config: MCPGRPOConfig
) -> Renderer:
    tokenizer = deepcopy(parts.tokenizer)  # a format of calls may change it
    rows = output_rows(name) if parts.is_real and name != STAND_IN else None
    chosen = set_call_format(tokenizer, config.call_format, rows)
    renderer = Renderer(
        tokenizer,
        end_of_turn_ids=_end_of_turn_ids(tokenizer, name, revision),
        chat_template_kwargs=cast(Any, config.chat_template_kwargs),
    )
    if chosen.name == "json":
        said = f"tool calls are written in blocks of fenced JSON: {chosen.reason}"
        if chosen.is_expected:
            findings.ok("chat template", said)
        else:
            findings.warn(
                "chat template", said, "Let it be, warm the model up, or take one that was trained on tools."
            )
    else:
        findings.ok("chat template", "renders tools, and carries calls and results token by token")
    if chosen.untrained:
        findings.fail(
            "tags",
            f"The model was never trained to write {' and '.join(chosen.untrained)}, the tags of its chat template, and an "
            "adapter on linear layers cannot learn them.",
            'Set `call_format="json"`, train all weights, or warm it up with `recipes/sft_warmup.py`.',
        )
    elif chosen.name == "template" and rows is None:
        findings.leave("tags", "the weights are not here to tell whether they were trained")
    elif chosen.name == "template":
        findings.ok("tags", "trained, as far as the weights tell")
    return renderer


def _end_of_turn_ids(tokenizer: Any, name: str, revision: str) -> list[int]:
    """Return the tokens that end a turn, as TRL finds them: the model's own, and the tokenizer's."""
    try:
        found = GenerationConfig.from_pretrained(name, revision=revision, local_files_only=True).eos_token_id
    except (OSError, ValueError):
        found = None
    ids = [] if found is None else [found] if isinstance(found, int) else list(found)
    return ids if tokenizer.eos_token_id in ids else [tokenizer.eos_token_id, *ids]


def _examine_lengths(
    findings: Findings, parts: ModelParts, config: MCPGRPOConfig, engine: RolloutEngine, tasks: Sequence[Task]
) -> None:
    renderer = parts.renderer
    assert renderer is not None
    longest = engine.longest_prompt(
        tasks or [Task(task_id="none", prompt=({"role": "user", "content": "?"},))], renderer
    )
    if longest is None:
        return
    task, length = longest
    size = engine.prompt_size(task, length, renderer)
    if not parts.is_real:
        parts.prompt_tokens = int(length / CHARACTERS_PER_TOKEN)
        findings.leave("prompts", f"about {parts.prompt_tokens} tokens, at {CHARACTERS_PER_TOKEN} characters each")
        return
    parts.prompt_tokens = length
    if parts.config is None:
        findings.ok("prompts", f"{size}; the context of the model is not known here")
        return
    sampler = config.vllm_max_model_length if config.use_vllm else None
    limits = make_limits(config, parts.config, sampler)
    problem, is_fatal = room_problem(length, limits)
    advice = "Allow fewer tools (`allowed_tools`, column `tools`), or lower `max_completion_length`."
    if is_fatal:
        findings.fail("prompts", f"{size}{problem}", advice)
    elif problem:
        findings.warn("prompts", f"{size}{problem}", advice)
    else:
        findings.ok("prompts", f"{size}, in a context of {limits.max_context}")
