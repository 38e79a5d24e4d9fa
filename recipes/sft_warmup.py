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

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from accelerate.utils import broadcast_object_list
from recipe_parts.alone import call_alone
from recipe_parts.command_line import StrictParser, write_settings
from recipe_parts.desk import TaskArguments
from recipe_parts.requirements import check_requirements
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, set_seed
from trl import ModelConfig, SFTTrainer, clone_chat_template, get_peft_config, get_quantization_config

from mcp_grpo import MCPGRPOConfig, MCPGRPOTrainer, Task
from mcp_grpo.errors import MCPGRPOError, SettingsError
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.train.imitation import (
    MIN_VALID_CALLS,
    WarmupConfig,
    calls_sentence,
    imitate,
    valid_calls,
    warm_model,
)


@dataclass
class WarmupArguments(TaskArguments):
    """
    Arguments of the warm start, beside those of [`TaskArguments`].

    Args:
        max_result_tokens (`int`, *optional*, defaults to `3072`):
            Tokens of one tool result, as in the training that follows. A solution with a longer one is left out: cut, it
            would teach to say what cannot be seen.
        enable_thinking (`bool`, *optional*, defaults to `False`):
            Of the chat template; as in the training that follows.
        call_format (`str`, *optional*, defaults to `"auto"`):
            How tool calls are written: `"template"`, `"json"`, or `"auto"`, as of `MCPGRPOConfig`. The training that follows
            finds it in the tokenizer.
        num_check_tasks (`int`, *optional*, defaults to `16`):
            Tasks to attempt at the end, to see whether the policy calls tools now; 0 for none. It has not imitated them, unless
            there are no others: they are the desk's validation tasks, those of `tasks` after the first `num_tasks`, or the last
            ones, which are then held out where they are at most a quarter.
        min_valid_calls (`float`, *optional*, defaults to `0.5`):
            Smallest share of its calls that can be made, below which the warm start has failed.
    """

    max_result_tokens: int = field(default=3072, metadata={"help": "Tokens of one tool result, as in training."})
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
        default=16,
        metadata={
            "help": "Tasks to attempt at the end, to see whether the policy calls tools now: others than it imitates, where there "
            "are any."
        },
    )
    min_valid_calls: float = field(
        default=MIN_VALID_CALLS,
        metadata={"help": "Smallest share of calls that can be made, below which the warm start has failed."},
    )


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
    servers = script.load_servers()
    tasks, others = split_tasks(script)
    trainer = imitate(
        policy,
        tokenizer,
        config,
        tasks,
        servers,
        name=model.model_name_or_path,
        init_kwargs=init_kwargs,
        chat_template_kwargs={"enable_thinking": script.enable_thinking},
        max_result_tokens=script.max_result_tokens,
        call_format=script.call_format,
        peft_config=get_peft_config(model),
        quantization_config=get_quantization_config(model),
    )
    if trainer.is_world_process_zero():
        write_settings(settings, folder / "config.yaml")
    if script.num_check_tasks:
        check_calls(
            trainer, others or tasks[: script.num_check_tasks], script, "not imitated" if others else "imitated"
        )
    return trainer


def split_tasks(script: WarmupArguments) -> tuple[list[Task], list[Task]]:
    """Return the tasks to imitate, and others to attempt at the end: none where all are needed to imitate."""
    number = script.num_check_tasks
    if script.tasks is None:
        tasks = tasks_from_rows(script.load(None, "train", script.num_tasks))
        return tasks, tasks_from_rows(script.load(None, "validation", number)) if number else []
    given = tasks_from_rows(script.load(script.tasks, "train", None))
    tasks, others = given[: script.num_tasks], given[script.num_tasks or len(given) :][:number]
    if len(others) < number <= len(tasks) / 4:
        return tasks[:-number], tasks[-number:]
    return tasks, others


def check_calls(trainer: SFTTrainer, tasks: list[Task], script: WarmupArguments, which: str) -> None:
    """
    Attempt tasks, print how many of the policy's calls can be made, and which tasks they are, and raise [`SettingsError`] if
    they are too few.
    """
    folder = Path(cast("str", trainer.args.output_dir))
    settings = {
        "output_dir": str(folder / "check"),
        "use_cpu": trainer.accelerator.device.type == "cpu",
        "bf16": trainer.args.bf16,
        "max_completion_length": max(4096, script.max_result_tokens + 1024),
        "max_result_tokens": script.max_result_tokens,
        "max_turn_tokens": 640,
        "chat_template_kwargs": {"enable_thinking": script.enable_thinking},
        "model_init_kwargs": {"dtype": str(trainer.model.dtype).removeprefix("torch.")},
        "save_strategy": "no",
        "report_to": "none",
    }
    arguments = (str(warm_model(folder)), tasks, script, settings)
    if trainer.accelerator.num_processes == 1:
        share, said = attempt(*arguments)
    else:
        found: list[Any] = [None]
        if trainer.is_world_process_zero():  # the others wait; they would end the run after `ddp_timeout`
            try:
                found = [call_alone(attempt, *arguments, seconds=0.9 * trainer.args.ddp_timeout)]
            except MCPGRPOError as error:
                found = [(None, str(error))]
        share, said = broadcast_object_list(found)[0]
    if share is None:
        raise SettingsError(
            f"Whether the policy calls tools now could not be measured: {said} It is saved in {folder}. Measure it by `mcp-grpo "
            f"eval TASKS --model {warm_model(folder)} --servers SERVERS --out OUT` (`valid tool calls`), or leave the measurement "
            "out with `--num_check_tasks 0`."
        )
    if trainer.is_world_process_zero():
        print(f"{said} The tasks were {which} before.")
    if share < script.min_valid_calls:
        raise SettingsError(
            f"The warm start has not taught the policy to call tools: {share:.0%} of its calls can be made, less than "
            f"`min_valid_calls` ({script.min_valid_calls:.0%}). It is saved in {folder}. Train longer (`--max_steps`, more "
            "`--num_tasks`), raise `--learning_rate`, leave `--use_peft` out, or set `--call_format json`, which a model need "
            "not learn new tags for."
        )


def attempt(model: str, tasks: list[Task], script: WarmupArguments, settings: dict[str, Any]) -> tuple[float, str]:
    """Return the share of calls that can be made in attempts at tasks, and a sentence that says it."""
    # Loaded anew, as rolling out changes how a model computes.
    with MCPGRPOTrainer(
        model,
        lambda completions, **kwargs: [0.0] * len(completions),
        MCPGRPOConfig(**settings),
        servers=script.load_servers(),
    ) as attempting:
        attempts = attempting.roll_out(tasks)
    return valid_calls(attempts)[0], calls_sentence(attempts)


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


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except MCPGRPOError as error:
        sys.exit(f"{type(error).__name__}: {error}")
