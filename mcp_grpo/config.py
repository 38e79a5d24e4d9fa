"""The settings of a run: TRL's, and a few of our own."""

from dataclasses import dataclass, field

from transformers.utils import is_torch_bf16_gpu_available
from trl.trainer.grpo_config import GRPOConfig

from mcp_grpo.errors import SettingsError


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
        trajectory_timeout (`float`, *optional*, defaults to `600.0`):
            Seconds a trajectory may take, tools and generation together. One that takes longer enters neither the loss
            nor the group's baseline.
        max_failed_fraction (`float`, *optional*, defaults to `0.25`):
            Share of the trajectories of a batch that may fail for reasons the policy is not to blame for (a server that
            broke, a deadline). With more, training stops with an error that says what broke.
    """

    max_turns: int = field(
        default=10,
        metadata={
            "help": "Times the policy may generate in one trajectory. A task's own `max_turns` comes first.",
        },
    )
    trajectory_timeout: float = field(
        default=600.0,
        metadata={
            "help": "Seconds a trajectory may take, tools and generation together. One that takes longer enters "
            "neither the loss nor the group's baseline.",
        },
    )
    max_failed_fraction: float = field(
        default=0.25,
        metadata={
            "help": "Share of the trajectories of a batch that may fail for reasons the policy is not to blame for (a "
            "server that broke, a deadline). With more, training stops with an error that says what broke.",
        },
    )

    def __post_init__(self) -> None:
        if self.bf16 is None and not self.use_cpu and not is_torch_bf16_gpu_available():
            self.bf16 = False  # TRL turns it on by default, and then refuses a machine that has no such GPU
        super().__post_init__()
        if self.max_turns < 1:
            raise SettingsError(f"`max_turns` must be at least 1, got {self.max_turns}.")
        if self.trajectory_timeout <= 0:
            raise SettingsError(
                f"`trajectory_timeout` must be a positive number of seconds, got {self.trajectory_timeout}."
            )
        if not 0 <= self.max_failed_fraction <= 1:
            raise SettingsError(f"`max_failed_fraction` must be between 0 and 1, got {self.max_failed_fraction}.")

    def check_for_servers(self) -> None:
        """
        Refuse settings that would not train correctly on MCP servers. The trainer calls it before it starts anything.

        Raises:
            [`SettingsError`]: If there is one; the message says what to set instead.
        """
        if self.use_vllm or self.use_transformers_continuous_batching:
            raise SettingsError(
                "With `servers`, the policy is sampled by plain transformers: set `use_vllm=False` and "
                "`use_transformers_continuous_batching=False`."
            )
        if self.remove_unused_columns:
            raise SettingsError("`remove_unused_columns=True` would drop the tasks' columns. Set it to `False`.")
        # The sampler's log-probabilities are the old ones of the ratio: they must be those of the policy itself.
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "generation_kwargs": None}
        for name, value in neutral.items():
            if getattr(self, name) not in (value, None):
                raise SettingsError(
                    f"`{name}={getattr(self, name)!r}` samples from another distribution than the one that is trained, "
                    f"so that ratios would be wrong. Leave it at {value!r}; use `temperature` to explore more or less."
                )
        if self.temperature <= 0:
            raise SettingsError(
                f"`temperature` must be positive, got {self.temperature}: a group needs varied attempts."
            )
