"""The settings of a run: TRL's, and a few of our own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from datasets import Dataset
from transformers import PretrainedConfig, ProcessorMixin
from transformers.utils.import_utils import is_torch_bf16_gpu_available
from trl.trainer.grpo_config import GRPOConfig

from mcp_grpo.errors import SettingsError
from mcp_grpo.rollout import Limits
from mcp_grpo.tools import Cassette


MIN_RESULT_TOKENS = 16  # with fewer, there is no room for the words that say that something was cut


@dataclass
class MCPGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`MCPGRPOTrainer`].

    This class includes only the parameters that are specific to training on MCP servers. For a full list of training
    arguments, please refer to the [`~trl.GRPOConfig`] and [`~transformers.TrainingArguments`] documentation. They mean
    what they mean there; `max_completion_length` counts tool results too, and `chat_template_kwargs` reaches the
    template of every turn.

    Args:
        max_turns (`int`, *optional*, defaults to `10`):
            Times the policy may generate in one trajectory. A task's own `max_turns` comes first.
        max_result_tokens (`int`, *optional*):
            Tokens of one tool result that the policy reads. A longer one is cut in the middle, with a note that says so.
            If `None`, half of `max_completion_length`.
        trajectory_timeout (`float`, *optional*, defaults to `600.0`):
            Seconds a trajectory may take, tools and generation together. Waiting for a server to be free does not count.
            One that takes longer enters neither the loss nor the group's baseline.
        max_failed_fraction (`float`, *optional*, defaults to `0.25`):
            Share of the trajectories of a batch that may fail for reasons the policy is not to blame for (a server that
            broke, a deadline). With more, training stops with an error that says what broke.
        cassette (`str`, *optional*):
            File in which tool calls are recorded, or from which they are answered. Each process has its own.
        cassette_mode (`str`, *optional*, defaults to `"record"`):
            `"record"` writes a new file; `"replay"` and `"match"` answer from it, without servers; `"cache"` asks servers
            only what the file does not know. See [`Cassette`].
    """

    max_turns: int = field(
        default=10,
        metadata={
            "help": "Times the policy may generate in one trajectory. A task's own `max_turns` comes first.",
        },
    )
    max_result_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Tokens of one tool result that the policy reads. A longer one is cut in the middle, with a note that "
            "says so. If `None`, half of `max_completion_length`.",
        },
    )
    trajectory_timeout: float = field(
        default=600.0,
        metadata={
            "help": "Seconds a trajectory may take, tools and generation together. Waiting for a server to be free does "
            "not count. One that takes longer enters neither the loss nor the group's baseline.",
        },
    )
    max_failed_fraction: float = field(
        default=0.25,
        metadata={
            "help": "Share of the trajectories of a batch that may fail for reasons the policy is not to blame for (a "
            "server that broke, a deadline). With more, training stops with an error that says what broke.",
        },
    )
    cassette: str | None = field(
        default=None,
        metadata={
            "help": "File in which tool calls are recorded, or from which they are answered. Each process has its own.",
        },
    )
    cassette_mode: str = field(
        default="record",
        metadata={
            "help": '"record" writes a new file; "replay" and "match" answer from it, without servers; "cache" asks '
            "servers only what the file does not know.",
        },
    )

    def __post_init__(self) -> None:
        if self.bf16 is None and not self.use_cpu and not is_torch_bf16_gpu_available():
            self.bf16 = False  # TRL turns it on by default, and then refuses a machine that has no such GPU
        super().__post_init__()
        if self.max_turns < 1:
            raise SettingsError(f"`max_turns` must be at least 1, got {self.max_turns}.")
        if self.max_result_tokens is not None and self.max_result_tokens < MIN_RESULT_TOKENS:
            raise SettingsError(
                f"`max_result_tokens` must be at least {MIN_RESULT_TOKENS}, got {self.max_result_tokens}: the policy could "
                "not read any result. Raise it, or leave it at `None` for half of `max_completion_length`."
            )
        if self.trajectory_timeout <= 0:
            raise SettingsError(
                f"`trajectory_timeout` must be a positive number of seconds, got {self.trajectory_timeout}."
            )
        if not 0 <= self.max_failed_fraction <= 1:
            raise SettingsError(f"`max_failed_fraction` must be between 0 and 1, got {self.max_failed_fraction}.")

    @property
    def replays(self) -> bool:
        """Whether tool calls are answered by a recording, so that no server is needed."""
        return self.cassette is not None and self.cassette_mode in ("replay", "match")

    def make_cassette(self) -> Cassette | None:
        """
        The recording that this process makes or plays.

        Returns:
            [`Cassette`] or `None`: The recording, if there is to be one. Raises [`CassetteError`] if it cannot be.
        """
        if self.cassette is None:
            return None
        return Cassette.for_rank(self.cassette, cast(Any, self.cassette_mode), self.process_index)

    def limits(self, model_config: PretrainedConfig) -> Limits:
        """
        Where a trajectory ends at the latest.

        Args:
            model_config ([`~transformers.PretrainedConfig`]):
                Configuration of the policy, which limits its context.

        Returns:
            [`Limits`]: The limits.
        """
        max_context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
        max_completion_length = self.max_completion_length or max_context
        if max_completion_length is None:
            raise SettingsError("Set `max_completion_length`: the model's configuration does not limit its context.")
        return Limits(
            max_turns=self.max_turns,
            max_completion_length=max_completion_length,
            max_context=max_context,
            max_result_tokens=self.max_result_tokens or max(MIN_RESULT_TOKENS, max_completion_length // 2),
            timeout=self.trajectory_timeout,
        )


def check_arguments(args: Any, train_dataset: Any, kwargs: Mapping[str, Any]) -> None:
    """
    Refuse, before anything is started, what would not train correctly on MCP servers.

    Args:
        args (`MCPGRPOConfig`):
            The trainer's configuration.
        train_dataset (`Dataset` or `IterableDataset`):
            Its tasks.
        kwargs (`Mapping[str, Any]`):
            Its other arguments.

    Raises:
        [`SettingsError`]: If there is such a thing; the message says what to set instead.
    """
    if not isinstance(args, MCPGRPOConfig):
        raise SettingsError(f"With `servers`, `args` must be an `MCPGRPOConfig`, got {type(args).__name__}.")
    for name in ("tools", "rollout_func", "environment_factory"):
        if kwargs.get(name) is not None:
            raise SettingsError(f"`{name}` and `servers` both say where tools come from. Pass only `servers`.")
    # The sampler's log-probabilities are the old ones of the ratio: they must be those of the policy itself.
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "generation_kwargs": None}
    for name, value in neutral.items():
        if getattr(args, name) not in (value, None):
            raise SettingsError(
                f"`{name}={getattr(args, name)!r}` samples from another distribution than the one that is trained, so "
                f"that ratios would be wrong. Leave it at {value!r}; use `temperature` to explore more or less."
            )
    for is_refused, message in _refusals(args, kwargs):
        if is_refused:
            raise SettingsError(message)
    num_tasks = cast("int", args.generation_batch_size) // cast("int", args.num_generations)
    if isinstance(train_dataset, Dataset) and len(train_dataset) < num_tasks:
        raise SettingsError(
            f"A batch holds {num_tasks} tasks (`generation_batch_size` {args.generation_batch_size} / `num_generations` "
            f"{args.num_generations}), but the dataset has only {len(train_dataset)}: not one batch could be made, and "
            "training would end at once. Add tasks, lower `per_device_train_batch_size`, or raise `num_generations`."
        )


def _refusals(args: MCPGRPOConfig, kwargs: Mapping[str, Any]) -> list[tuple[bool | int | None, str]]:
    """What cannot be, and what to say to it."""
    return [
        (
            args.temperature <= 0,
            f"`temperature` must be positive, got {args.temperature}: a group needs varied attempts.",
        ),
        (
            args.use_vllm or args.use_transformers_continuous_batching,
            "With `servers`, the policy is sampled by plain transformers: set `use_vllm=False` and "
            "`use_transformers_continuous_batching=False`.",
        ),
        (
            bool(args.fsdp),
            "FSDP cannot generate with `servers`: its processes must call the model equally often, and trajectories "
            "differ. Use DDP, or DeepSpeed ZeRO-3 with `ds3_gather_for_generation=True`.",
        ),
        (
            not args.ds3_gather_for_generation,
            "With `servers`, `ds3_gather_for_generation` must stay `True`: trajectories differ in length.",
        ),
        (
            args.gradient_accumulation_steps % cast("int", args.steps_per_generation),
            f"`gradient_accumulation_steps` ({args.gradient_accumulation_steps}) must be a multiple of "
            f"`steps_per_generation` ({args.steps_per_generation}), so that every update holds whole groups.",
        ),
        (
            args.remove_unused_columns,
            "`remove_unused_columns=True` would drop the tasks' columns. Set it to `False`.",
        ),
        (
            isinstance(kwargs.get("processing_class"), ProcessorMixin),
            "`processing_class` must be a tokenizer: tools are text. Pass the processor's `.tokenizer`.",
        ),
    ]
