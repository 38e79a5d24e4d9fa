"""Imitate solutions: a policy that cannot call tools learns to, on the tokens of rollouts."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import anyio
import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from transformers.utils.import_utils import is_torch_bf16_gpu_available

from mcp_grpo.errors import SettingsError
from mcp_grpo.evaluation import run_solutions
from mcp_grpo.learning import LabelledOnly, PromptSharing, SharedPrompts, Unpadded, depends_on_width
from mcp_grpo.rewards import is_done
from mcp_grpo.rollout import Renderer, conversation_tokens, output_rows, set_call_format
from mcp_grpo.sampling.threads import choose_threads
from mcp_grpo.tools import ToolPool
from mcp_grpo.tools.users import User
from mcp_grpo.trl_compat import SFTConfig, SFTTrainer, give_bias, unset_hf_deepspeed_config
from mcp_grpo.types import Task, Trajectory


IGNORED = -100  # label of a token that is not trained on
MERGED = "merged"  # folder of the whole model, where an adapter was trained
MIN_VALID_CALLS = 0.5  # share of calls that can be made, below which a policy is punished rather than taught
GOOD_VALID_CALLS = 0.8  # share below which a policy is better off with a warm start, if there is something to imitate

logger = logging.getLogger(__name__)


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


class Imitation(SFTTrainer):
    """
    TRL's trainer, in which what the solutions of a pass begin with, such as the tools, is run once. Losses and gradients are the same up to
    rounding. Where that cannot be, it says why.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sharing = PromptSharing()
        self._shares: bool | None = None  # which the first pass finds out

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss as TRL does, on rows that share what they begin with."""
        if not return_outputs and self._has_plain_rows(inputs):
            called = LabelledOnly(model)
            rows = Unpadded(called)
            model = SharedPrompts(called, rows) if self._can_share(model) else rows
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _has_plain_rows(self, inputs: Any) -> bool:
        """Return whether a pass is of rows that a model may be given in another form."""
        is_packed = inputs.keys() != {"input_ids", "attention_mask", "labels"}
        reads_logits = self.label_smoother or self.compute_loss_func
        as_given = cast("SFTConfig", self.args).pad_to_multiple_of or getattr(
            self.accelerator, "parallelism_config", None
        )
        config = self.accelerator.unwrap_model(self.model).config
        return not is_packed and not reads_logits and not as_given and not depends_on_width(config)

    def _can_share(self, model: Any) -> bool:
        if self._shares is None:
            hindrance = self._hindrance(model)
            with self.accelerator.autocast():  # the trial goes by the type that is computed in
                self._shares = hindrance is None and self._sharing.is_possible(model)
            if not self._shares and self.is_world_process_zero():
                logger.warning(
                    "Each solution is run by itself, which takes longer: %s", hindrance or self._sharing.reason
                )
        return self._shares

    def _hindrance(self, model: Any) -> str | None:
        """Say what would be drawn, or counted, once for all rows that share a token, if anything is."""
        if any(isinstance(each, torch.nn.Dropout) and each.p > 0 for each in model.modules()):
            return "there is dropout. Set `lora_dropout` to 0, if it is the adapter's."
        if self.neftune_noise_alpha is not None:
            return "`neftune_noise_alpha` is set."
        if self.aux_loss_enabled:
            return (
                "the load of the model's experts is balanced, which counts each token of each solution. Set `router_aux_loss_coef` to 0 to "
                "leave that out."
            )
        return None


def imitate(
    policy: Any,
    tokenizer: Any,
    config: WarmupConfig,
    tasks: Sequence[Task],
    servers: Any,
    *,
    name: str,
    init_kwargs: dict[str, Any],
    chat_template_kwargs: dict[str, Any],
    max_result_tokens: int,
    call_format: str = "auto",
    peft_config: Any = None,
    quantization_config: Any = None,
    user: User | None = None,
    is_success: Callable[[Trajectory], bool] = is_done,
    callbacks: Sequence[TrainerCallback] = (),
) -> SFTTrainer:
    """
    Train a policy on the solutions of tasks, run on the servers, and save it to `output_dir` of the settings.

    Args:
        policy (`str` or `PreTrainedModel`):
            Name or folder of the model, or the model.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer. It gets the chat template of training.
        config ([`WarmupConfig`]):
            The settings.
        tasks (`Sequence[Task]`):
            Tasks with a column `solution` or `messages`.
        servers (`Any`):
            What [`MCPGRPOTrainer`] takes as `servers`.
        name (`str`):
            Name or folder of the model, from which it is loaded anew to merge an adapter into it.
        init_kwargs (`dict[str, Any]`):
            How it is loaded.
        chat_template_kwargs (`dict[str, Any]`):
            Of the chat template; as in the training that follows.
        max_result_tokens (`int`):
            Tokens of one tool result, as in the training that follows. Solutions with a longer one are left out.
        call_format (`str`, *optional*, defaults to `"auto"`):
            As of [`MCPGRPOConfig`].
        peft_config (`PeftConfig`, *optional*):
            The adapter to train; all weights if not given. The whole model is then saved to `merged` in the folder.
        quantization_config (`Any`, *optional*):
            How the weights below an adapter are quantised.
        user (`Callable`, *optional*):
            Says what users say next, as [`MCPGRPOTrainer`] takes it.
        is_success (`Callable[[Trajectory], bool]`, *optional*):
            Whether a solution does its task; whether it gives the task's answer and leaves the state it asks for, if not given.
        callbacks (`Sequence[TrainerCallback]`, *optional*):
            Of the trainer.

    Returns:
        [`~trl.SFTTrainer`]: The finished trainer.
    """
    folder = Path(cast("str", config.output_dir))
    config.model_init_kwargs = init_kwargs if isinstance(policy, str) else None
    chosen = set_call_format(tokenizer, call_format, output_rows(policy))
    if config.process_index == 0:
        chosen.say()
    if peft_config is not None and chosen.untrained:
        train_rows(peft_config, tokenizer, chosen.untrained, name, init_kwargs.get("revision"))
    renderer = Renderer(tokenizer, end_of_turn_ids=[tokenizer.eos_token_id], chat_template_kwargs=chat_template_kwargs)
    made: list[Dataset | None] = [None]
    if config.process_index == 0:  # servers need not answer twice alike, and processes must agree on the steps
        solved = conversations(tasks, servers, user, is_success)
        made[0] = make_dataset(
            solved,
            anyio.run(tools_of, [task for task, _ in solved], servers),
            renderer,
            max_result_tokens=max_result_tokens,
            max_length=config.max_length,
        )
    [dataset] = broadcast_object_list(made)
    # With it, the policy is served as it was trained.
    tokenizer.chat_template = renderer.chat_template or tokenizer.chat_template
    trainer = Imitation(
        policy,
        config,
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=peft_config,
        quantization_config=quantization_config,
        callbacks=[*callbacks],
    )
    model: Any = trainer.model
    give_bias(trainer.accelerator.unwrap_model(model))
    if trainer.accelerator.device.type == "cpu":
        choose_threads(model.num_parameters())
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero() and peft_config is not None:  # what follows starts with an adapter of its own
        save_merged(name, init_kwargs, folder)
        tokenizer.save_pretrained(folder / MERGED)
    trainer.accelerator.wait_for_everyone()
    return trainer


def warm_model(folder: Path) -> Path:
    """Return the whole model that [`imitate`] has left in a folder."""
    return folder / MERGED if (folder / MERGED).exists() else folder


def conversations(
    tasks: Sequence[Task],
    servers: Any,
    user: User | None = None,
    is_success: Callable[[Trajectory], bool] = is_done,
) -> list[tuple[Task, list[dict[str, Any]]]]:
    """
    Return each task with the messages after its prompt: recorded, or from its solution on the servers.

    Solutions that do not solve their task are left out.
    """
    recorded = [(task, list(task.metadata["messages"])) for task in tasks if task.metadata.get("messages")]
    scripted = [task for task in tasks if not task.metadata.get("messages")]
    found = run_solutions(scripted, servers, user=user, is_success=is_success) if scripted else []
    solved = [(one.trajectory.task, list(one.trajectory.messages)) for one in found if not one.problems]
    if len(solved) < len(found):
        logger.warning(
            "%d of %d solutions do not solve their task and are left out.", len(found) - len(solved), len(found)
        )
    return recorded + solved


async def tools_of(tasks: Sequence[Task], servers: Any) -> list[list[dict[str, Any]]]:
    """Return the tools of each task in the form that chat templates take."""
    async with ToolPool(servers) as pool:
        pool.catalog.check(*tasks)
        return [[tool.schema for tool in pool.catalog.tools_for(task)] for task in tasks]


def make_dataset(
    solved: Sequence[tuple[Task, list[dict[str, Any]]]],
    tools: Sequence[list[dict[str, Any]]],
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


def train_rows(peft_config: Any, tokenizer: Any, tokens: tuple[str, ...], name: str, revision: str | None) -> None:
    """Let an adapter also train the rows of tokens that the model was never trained on, of input and output embeddings."""
    is_tied = AutoConfig.from_pretrained(name, revision=revision).get_text_config().tie_word_embeddings
    rows = tokenizer.convert_tokens_to_ids(list(tokens))
    peft_config.trainable_token_indices = rows if is_tied else {"embed_tokens": rows, "lm_head": rows}
    logger.warning("The adapter trains the rows of %s, too; they are part of the merged model.", " and ".join(tokens))


def valid_calls(attempts: Sequence[Trajectory]) -> tuple[float, int]:
    """Return the share of calls that could be made, an attempt without any counted as one, and how many had some."""
    calling = [attempt for attempt in attempts if attempt.exchanges]
    made = [not exchange.result.kind.is_policy_fault for attempt in calling for exchange in attempt.exchanges]
    return sum(made) / max(1, len(made) + len(attempts) - len(calling)), len(calling)


def calls_sentence(attempts: Sequence[Trajectory]) -> str:
    """Say how many of the calls in attempts could be made."""
    share, num_calling = valid_calls(attempts)
    return (
        f"Of {len(attempts)} attempts {num_calling} called a tool; {share:.0%} of the calls could be made, an attempt without "
        "one counted as a call that could not."
    )


def save_merged(name: str, model_init_kwargs: dict[str, Any], folder: Path) -> None:
    """Merge a saved adapter into its base model, loaded anew: the trainer's may be quantised or sharded."""
    unset_hf_deepspeed_config()  # with ZeRO-3, this process would wait for the others to load their shares
    kwargs = {
        key: value for key, value in model_init_kwargs.items() if key not in ("quantization_config", "device_map")
    }
    base = AutoModelForCausalLM.from_pretrained(name, **kwargs)
    merged: Any = PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    merged.save_pretrained(folder / MERGED)
