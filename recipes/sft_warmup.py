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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, set_seed
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

from mcp_grpo import MCPGRPOConfig, MCPGRPOTrainer, Task, ToolPool, Trajectory
from mcp_grpo.errors import MCPGRPOError, SettingsError
from mcp_grpo.evaluation import run_solutions
from mcp_grpo.rollout import Renderer, conversation_tokens, output_rows, set_call_format
from mcp_grpo.sampling.threads import choose_threads
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.trl_compat import give_bias


IGNORED = -100  # label of a token that is not trained on

logger = logging.getLogger("recipes")


@dataclass
class WarmupArguments(TaskArguments):
    """
    Arguments of the warm start, beside those of [`TaskArguments`].

    Args:
        max_result_tokens (`int`, *optional*, defaults to `1024`):
            Tokens of one tool result, as in the training that follows. A solution with a longer one is left out: cut, it
            would teach to say what cannot be seen.
        enable_thinking (`bool`, *optional*, defaults to `False`):
            Of the chat template; as in the training that follows.
        call_format (`str`, *optional*, defaults to `"auto"`):
            How tool calls are written: `"template"`, `"json"`, or `"auto"`, as of `MCPGRPOConfig`. The training that follows
            finds it in the tokenizer.
        num_check_tasks (`int`, *optional*, defaults to `16`):
            Tasks to attempt at the end, to see whether the policy calls tools now; 0 for none.
        min_valid_calls (`float`, *optional*, defaults to `0.5`):
            Smallest share of its calls that can be made, below which the warm start has failed.
    """

    max_result_tokens: int = field(default=1024, metadata={"help": "Tokens of one tool result, as in training."})
    enable_thinking: bool = field(
        default=False, metadata={"help": "Of the chat template; as in the training that follows."}
    )
    call_format: str = field(
        default="auto",
        metadata={
            "help": "How tool calls are written: as the chat template does, in fenced JSON, or what fits the model."
        }
        | {"choices": ["auto", "template", "json"]},
    )
    num_check_tasks: int = field(
        default=16, metadata={"help": "Tasks to attempt at the end, to see whether the policy calls tools now."}
    )
    min_valid_calls: float = field(
        default=0.5,
        metadata={"help": "Smallest share of calls that can be made, below which the warm start has failed."},
    )


@dataclass
class WarmupConfig(SFTConfig):
    """TRL's settings with other defaults: whole conversations, and a few hundred steps with an adapter."""

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
    Return each task with the messages after its prompt: recorded, or from its solution on the servers.

    Solutions that do not solve their task are left out.
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
    """Return the tools of each task in the form that chat templates take."""
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
    """Return the tokens of rollouts, with labels only where the policy writes."""
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
    """Read the command line."""
    script, config, model, settings = StrictParser([WarmupArguments, WarmupConfig, ModelConfig], __doc__ or "").parse(
        arguments
    )
    if model.model_name_or_path is None:
        raise SettingsError("Which model? Add `--model_name_or_path Qwen/Qwen3-0.6B`, or another, or a folder.")
    config.output_dir = settings["output_dir"] = config.output_dir or "outputs/sft_warmup"
    return script, config, model, settings


def main(arguments: list[str]) -> SFTTrainer:
    """Train on the solutions, and return the finished trainer."""
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
    call_format = set_call_format(tokenizer, script.call_format, output_rows(policy))
    if config.process_index == 0:
        call_format.say()
    peft_config = get_peft_config(model)
    if peft_config is not None and call_format.untrained:
        train_rows(peft_config, tokenizer, call_format.untrained, model, init_kwargs)
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
        peft_config=peft_config,
        quantization_config=get_quantization_config(model),
    )
    give_bias(trainer.accelerator.unwrap_model(trainer.model))
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
    if script.num_check_tasks and trainer.accelerator.num_processes == 1:
        check_calls(trainer, tasks[: script.num_check_tasks], servers, script)
    return trainer


def train_rows(
    peft_config: Any, tokenizer: Any, tokens: tuple[str, ...], model: ModelConfig, init_kwargs: dict[str, Any]
) -> None:
    """Let an adapter also train the rows of tokens that the model was never trained on, of input and output embeddings."""
    name, revision = model.model_name_or_path, init_kwargs["revision"]
    is_tied = AutoConfig.from_pretrained(name, revision=revision).get_text_config().tie_word_embeddings
    rows = tokenizer.convert_tokens_to_ids(list(tokens))
    peft_config.trainable_token_indices = rows if is_tied else {"embed_tokens": rows, "lm_head": rows}
    logger.warning("The adapter trains the rows of %s, too; they are part of the merged model.", " and ".join(tokens))


def check_calls(trainer: SFTTrainer, tasks: list[Task], servers: Any, script: WarmupArguments) -> None:
    """Attempt tasks, print how many of the policy's calls can be made, and raise [`SettingsError`] if they are too few."""
    folder = Path(cast("str", trainer.args.output_dir))
    settings = MCPGRPOConfig(
        output_dir=str(folder / "check"),
        use_cpu=trainer.accelerator.device.type == "cpu",
        bf16=trainer.args.bf16,
        max_completion_length=4 * script.max_result_tokens,
        max_result_tokens=script.max_result_tokens,
        max_turn_tokens=512,
        chat_template_kwargs={"enable_thinking": script.enable_thinking},
        model_init_kwargs={"dtype": str(trainer.model.dtype).removeprefix("torch.")},
        save_strategy="no",
        report_to="none",
    )
    # Loaded anew, as rolling out changes how a model computes.
    saved = folder / "merged" if (folder / "merged").exists() else folder
    with MCPGRPOTrainer(
        str(saved), lambda completions, **kwargs: [0.0] * len(completions), settings, servers=servers
    ) as attempting:
        attempts = attempting.roll_out(tasks)
    share, num_calling = valid_calls(attempts)
    print(
        f"Of {len(attempts)} attempts {num_calling} called a tool; {share:.0%} of the calls could be made, an attempt without "
        "one counted as a call that could not."
    )
    if share < script.min_valid_calls:
        raise SettingsError(
            f"The warm start has not taught the policy to call tools: {share:.0%} of its calls can be made, less than "
            f"`min_valid_calls` ({script.min_valid_calls:.0%}). It is saved in {folder}. Train longer (`--max_steps`, more "
            "`--num_tasks`), raise `--learning_rate`, leave `--use_peft` out, or set `--call_format json`, which a model need "
            "not learn new tags for."
        )


def valid_calls(attempts: list[Trajectory]) -> tuple[float, int]:
    """Return the share of calls that could be made, an attempt without any counted as one, and how many had some."""
    calling = [attempt for attempt in attempts if attempt.exchanges]
    made = [not exchange.result.kind.is_policy_fault for attempt in calling for exchange in attempt.exchanges]
    return sum(made) / max(1, len(made) + len(attempts) - len(calling)), len(calling)


def take_chat_template(
    model: ModelConfig, init_kwargs: dict[str, Any], tokenizer: PreTrainedTokenizerBase, config: WarmupConfig
) -> Any:
    """Give a model that knows no tools a chat template that does, with the tokens that go with it."""
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
    """Merge a saved adapter into its base model, loaded anew: the trainer's may be quantised or sharded."""
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
