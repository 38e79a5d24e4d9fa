# /// script
# requires-python = ">=3.11"
# dependencies = ["mcp-grpo"]
# ///
"""
Supervised warm start: a model that cannot form tool calls learns to, before reinforcement learning.

    accelerate launch recipes/sft_warmup.py --model_name_or_path Qwen/Qwen3-0.6B --output_dir outputs/warm --use_peft

    accelerate launch recipes/grpo_qwen3.py --config recipes/configs/qwen3_0.6b_lora_vllm.yaml \\
        --model_name_or_path outputs/warm/merged

It imitates solutions: scripted ones (column `solution`), which are run on the real servers so that results are real, or
recorded ones (column `messages`: the turns and results that followed the prompt). The tokens are those of a rollout, made by
the same renderer, and the loss is only on those that the policy writes: neither on the prompt nor on what tools return.
"""

import os


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the cores to others; before torch comes

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import anyio
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from peft import PeftModel
from recipe_parts.command_line import StrictParser, write_settings
from recipe_parts.desk import TaskArguments
from recipe_parts.requirements import check_requirements
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.utils.import_utils import is_torch_bf16_gpu_available
from trl import (
    ModelConfig,
    SFTConfig,
    SFTTrainer,
    clone_chat_template,
    get_peft_config,
    get_quantization_config,
)

from mcp_grpo import Task, ToolPool
from mcp_grpo.errors import MCPGRPOError, SettingsError
from mcp_grpo.evaluation import run_solutions
from mcp_grpo.rollout import Renderer, conversation_tokens
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.threads import choose_threads


IGNORED = -100  # label of a token that is not trained on

logger = logging.getLogger("recipes")


@dataclass
class WarmupArguments(TaskArguments):
    """
    What to imitate; beside what [`TaskArguments`] has.

    Args:
        max_result_tokens (`int`, *optional*, defaults to `1024`):
            Tokens of one tool result, as in the training that follows. A solution with a longer one is left out: cut, it
            would teach to say what cannot be seen.
        enable_thinking (`bool`, *optional*, defaults to `False`):
            Of the chat template; as in the training that follows.
    """

    max_result_tokens: int = field(default=1024, metadata={"help": "Tokens of one tool result, as in training."})
    enable_thinking: bool = field(
        default=False, metadata={"help": "Of the chat template; as in the training that follows."}
    )


@dataclass
class WarmupConfig(SFTConfig):
    """TRL's settings, with other defaults: whole conversations, and a few hundred steps with an adapter."""

    max_length: int | None = field(default=8192, metadata={"help": "Longer conversations are left out, not cut."})
    learning_rate: float = field(default=1e-4, metadata={"help": "The initial learning rate for AdamW."})
    per_device_train_batch_size: int = field(default=4, metadata={"help": "Batch size per device for training."})
    gradient_accumulation_steps: int = field(default=4, metadata={"help": "Passes before an update."})
    num_train_epochs: float = field(default=1.0, metadata={"help": "Total number of training epochs to perform."})

    def __post_init__(self) -> None:
        if self.bf16 is None and (self.use_cpu or not is_torch_bf16_gpu_available()):
            self.bf16 = False  # as of `MCPGRPOConfig`
        super().__post_init__()


def conversations(tasks: list[Task], servers: Any) -> list[tuple[Task, list[dict[str, Any]]]]:
    """
    What followed each prompt: as it was recorded, or as a scripted solution does it on the servers.

    Args:
        tasks (`list[Task]`):
            Tasks with a column `messages` or `solution`.
        servers (`Any`):
            The servers.

    Returns:
        `list[tuple[Task, list[dict[str, Any]]]]`: Each task with its messages. Solutions that do not solve their task are
        left out.
    """
    recorded = [(task, list(task.metadata["messages"])) for task in tasks if task.metadata.get("messages")]
    scripted = [task for task in tasks if not task.metadata.get("messages")]
    found = run_solutions(scripted, servers) if scripted else []
    solved = [(one.trajectory.task, list(one.trajectory.messages)) for one in found if not one.problems]
    if len(solved) < len(found):
        logger.warning(
            "%d of %d solutions do not solve their task and are left out.", len(found) - len(solved), len(found)
        )
    return recorded + solved


async def tools_of(tasks: list[Task], servers: Any) -> list[list[dict[str, Any]]]:
    """
    The tools that each task offers, as chat templates take them.

    Args:
        tasks (`list[Task]`):
            The tasks.
        servers (`Any`):
            The servers.

    Returns:
        `list[list[dict[str, Any]]]`: Their schemas.
    """
    async with ToolPool(servers) as pool:
        pool.catalog.check(*tasks)
        return [[tool.schema for tool in pool.catalog.tools_for(task)] for task in tasks]


def make_dataset(
    solved: list[tuple[Task, list[dict[str, Any]]]],
    tools: list[list[dict[str, Any]]],
    renderer: Renderer,
    *,
    max_result_tokens: int,
    max_length: int | None,
) -> Dataset:
    """
    The tokens of rollouts, with labels only where the policy writes.

    Args:
        solved (`list[tuple[Task, list[dict[str, Any]]]]`):
            Tasks and the messages that followed their prompts.
        tools (`list[list[dict[str, Any]]]`):
            The tools that each task offers.
        renderer ([`Renderer`]):
            That of the rollout.
        max_result_tokens (`int`):
            Tokens of one tool result.
        max_length (`int`, *optional*):
            Tokens of a conversation.

    Returns:
        [`~datasets.Dataset`]: With the columns `input_ids` and `labels`. Conversations that are too long are left out.
    """
    rows, num_long = [], 0
    for (task, messages), schemas in zip(solved, tools, strict=True):
        results = [message["content"] for message in messages if message["role"] == "tool"]
        if any(renderer.shortened(text, max_result_tokens)[1] for text in results):
            num_long += 1
            continue
        token_ids, mask = conversation_tokens(renderer, task.prompt, messages, schemas)
        if max_length is not None and len(token_ids) > max_length:
            num_long += 1
            continue
        labels = [token if written else IGNORED for token, written in zip(token_ids, mask, strict=True)]
        rows.append({"input_ids": token_ids, "labels": labels})
    if num_long:
        logger.warning("%d of %d conversations are too long and are left out.", num_long, len(solved))
    if not rows:
        raise SettingsError(
            "There is nothing to imitate: every conversation is too long, or there is none. Raise `max_result_tokens` or "
            "`max_length`, or name tasks with a column `solution` or `messages`."
        )
    return Dataset.from_list(rows)


def parse(arguments: list[str]) -> tuple[WarmupArguments, WarmupConfig, ModelConfig, dict[str, Any]]:
    """
    Read the command line.

    Args:
        arguments (`list[str]`):
            The command line, without the program.

    Returns:
        `tuple[WarmupArguments, WarmupConfig, ModelConfig, dict[str, Any]]`: What it says, and all settings as they were given.
    """
    script, config, model, settings = StrictParser([WarmupArguments, WarmupConfig, ModelConfig], __doc__ or "").parse(
        arguments
    )
    if model.model_name_or_path is None:
        raise SettingsError("Which model? Add `--model_name_or_path Qwen/Qwen3-0.6B`, or another, or a folder.")
    config.output_dir = settings["output_dir"] = config.output_dir or "outputs/sft_warmup"
    return script, config, model, settings


def main(arguments: list[str]) -> SFTTrainer:
    """
    Imitate.

    Args:
        arguments (`list[str]`):
            The command line, without the program.

    Returns:
        [`~trl.SFTTrainer`]: The trainer, when it is done.
    """
    script, config, model, settings = parse(arguments)
    check_requirements(config, model)  # before anything that takes time
    folder = Path(cast("str", config.output_dir))
    init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(config.model_init_kwargs or {}),
    }
    policy: Any = model.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, revision=model.model_revision)
    if config.chat_template_path is not None:
        policy = take_chat_template(model, init_kwargs, tokenizer, config)
    config.model_init_kwargs = init_kwargs if isinstance(policy, str) else None
    renderer = Renderer(
        tokenizer,
        end_of_turn_ids=[tokenizer.eos_token_id],
        chat_template_kwargs={"enable_thinking": script.enable_thinking},
    )
    servers = script.load_servers()
    tasks = tasks_from_rows(script.load(script.tasks, "train", script.num_tasks))
    made: list[Dataset | None] = [None]
    if (
        config.process_index == 0
    ):  # servers need not answer twice alike, and processes must agree on the number of steps
        solved = conversations(tasks, servers)
        made[0] = make_dataset(
            solved,
            anyio.run(tools_of, [task for task, _ in solved], servers),
            renderer,
            max_result_tokens=script.max_result_tokens,
            max_length=config.max_length,
        )
    [dataset] = broadcast_object_list(made)
    # With it, the policy is served as it was trained.
    tokenizer.chat_template = renderer.chat_template or tokenizer.chat_template
    trainer = SFTTrainer(
        policy,
        config,
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=get_peft_config(model),
        quantization_config=get_quantization_config(model),
    )
    if trainer.accelerator.device.type == "cpu":
        choose_threads(trainer.model.num_parameters())
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        write_settings(settings, folder / "config.yaml")
        if model.use_peft:  # reinforcement learning starts with an adapter of its own
            save_merged(model.model_name_or_path, init_kwargs, folder)
            tokenizer.save_pretrained(folder / "merged")
    trainer.accelerator.wait_for_everyone()
    return trainer


def take_chat_template(
    model: ModelConfig, init_kwargs: dict[str, Any], tokenizer: PreTrainedTokenizerBase, config: WarmupConfig
) -> Any:
    """
    Give a model that knows no tools a chat template that does, with the tokens that go with it.

    Args:
        model ([`~trl.ModelConfig`]):
            Which model.
        init_kwargs (`dict[str, Any]`):
            How it is loaded.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer. Gets the template.
        config (`WarmupConfig`):
            Has `chat_template_path`, a Jinja file, or the model or folder whose tokenizer has the template; and has it no more.

    Returns:
        `str` or [`~transformers.PreTrainedModel`]: The model, which has been loaded if it got embeddings for new tokens.
    """
    source = str(config.chat_template_path)
    config.chat_template_path = None
    if source.endswith((".jinja", ".j2")):
        if not Path(source).is_file():
            raise SettingsError(f"`chat_template_path` names a file that is not there: {source}.")
        tokenizer.chat_template = Path(source).read_text(encoding="utf-8")
        return model.model_name_or_path
    if model.use_peft or model.load_in_4bit or model.load_in_8bit:
        raise SettingsError(
            f"With the chat template of {source!r}, the model gets tokens that it has never seen, and an adapter does not "
            "train their embeddings. Leave `use_peft` and quantisation out, so that all weights are trained, or let "
            "`chat_template_path` name a Jinja file, which adds no tokens."
        )
    policy = AutoModelForCausalLM.from_pretrained(model.model_name_or_path, **init_kwargs)
    set_seed(config.seed)  # of the new embeddings
    clone_chat_template(policy, tokenizer, source)
    return policy


def save_merged(name: str, model_init_kwargs: dict[str, Any], folder: Path) -> None:
    """
    Merge a saved adapter into its base model, which is loaded anew: that of the trainer may be quantised, or a share of it.

    Args:
        name (`str`):
            The base model.
        model_init_kwargs (`dict[str, Any]`):
            How the trainer loaded it.
        folder (`Path`):
            Folder with the adapter; the model goes to `merged` in it.
    """
    unset_hf_deepspeed_config()  # with ZeRO-3, this process would wait for the others to load their shares
    kwargs = {
        key: value for key, value in model_init_kwargs.items() if key not in ("quantization_config", "device_map")
    }
    base = AutoModelForCausalLM.from_pretrained(name, **kwargs)
    PeftModel.from_pretrained(base, str(folder)).merge_and_unload().save_pretrained(folder / "merged")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except MCPGRPOError as error:
        sys.exit(f"{type(error).__name__}: {error}")
