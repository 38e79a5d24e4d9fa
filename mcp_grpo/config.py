"""The settings of a run: TRL's, and a few of our own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from datasets import Dataset
from transformers import PretrainedConfig, ProcessorMixin
from transformers.utils.import_utils import is_torch_bf16_gpu_available
from trl.trainer.grpo_config import GRPOConfig

from mcp_grpo.errors import SettingsError
from mcp_grpo.learning import GrammarRoles, MaskRule, SamplerRoles, SchemaMask, SyntaxRoles
from mcp_grpo.rollout import Limits, Renderer
from mcp_grpo.rollout.grammar import TurnGrammars
from mcp_grpo.tools import Cassette


SCHEMA_MASKS = ["off", "syntax", "grammar", "sampler"]
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
        schema_mask (`str`, *optional*, defaults to `"off"`):
            Whether the syntax of tool calls leaves the policy loss, token by token. `"syntax"` finds it by the chat
            template and the tools' schemas; `"grammar"` by a grammar of them, which needs the extra `grammar`;
            `"sampler"` by what the sampler says, with `constrained_decoding`.
        schema_mask_min_prob (`float`, *optional*, defaults to `0.99`):
            Smallest probability that a token of syntax was sampled with to be masked. Where the format is not reliable
            yet, nothing is masked, and it is learnt. 0 masks all of it.
        schema_mask_weight (`float`, *optional*, defaults to `0.0`):
            What the advantage of a masked token is multiplied by. 0 takes it out of the loss and its denominators;
            anything more leaves it in, with that weight.
        mask_trigger (`bool`, *optional*, defaults to `False`):
            Whether the tokens that open a tool call are masked too, and with them the choice to call one.
        kl_on_forced (`bool`, *optional*, defaults to `True`):
            Whether masked tokens keep their KL term, if `beta` is not 0, so that the format does not drift unseen.
        min_unforced_tokens (`int`, *optional*, defaults to `16`):
            Tokens that must stay in the loss of a batch. The least probable of the masked ones come back to make up for
            it.
        min_unforced_fraction (`float`, *optional*, defaults to `0.3`):
            The same, as a share of the tokens that the policy sampled.
        constrained_decoding (`bool`, *optional*, defaults to `False`):
            Whether tool calls are sampled under the grammar of the tools, so that they are always valid. The policy then
            does not learn the format, and ratios are those of the constrained distribution. Needs the extra `grammar`,
            and `schema_mask="sampler"`.
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
    schema_mask: str = field(
        default="off",
        metadata={
            "help": "Whether the syntax of tool calls leaves the policy loss, token by token.",
            "choices": SCHEMA_MASKS,
        },
    )
    schema_mask_min_prob: float = field(
        default=0.99,
        metadata={
            "help": "Smallest probability that a token of syntax was sampled with to be masked. 0 masks all of it.",
        },
    )
    schema_mask_weight: float = field(
        default=0.0,
        metadata={
            "help": "What the advantage of a masked token is multiplied by. 0 takes it out of the loss altogether.",
        },
    )
    mask_trigger: bool = field(
        default=False,
        metadata={
            "help": "Whether the tokens that open a tool call are masked too, and with them the choice to call one.",
        },
    )
    kl_on_forced: bool = field(
        default=True,
        metadata={
            "help": "Whether masked tokens keep their KL term, if `beta` is not 0, so that the format does not drift unseen.",
        },
    )
    min_unforced_tokens: int = field(
        default=16,
        metadata={
            "help": "Tokens that must stay in the loss of a batch. The least probable of the masked ones come back.",
        },
    )
    min_unforced_fraction: float = field(
        default=0.3,
        metadata={
            "help": "The same, as a share of the tokens that the policy sampled.",
        },
    )
    constrained_decoding: bool = field(
        default=False,
        metadata={
            "help": 'Whether tool calls are sampled under the grammar of the tools. Needs `schema_mask="sampler"`.',
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
        self._check_schema_mask()

    def _check_schema_mask(self) -> None:
        if self.schema_mask not in SCHEMA_MASKS:
            raise SettingsError(f"`schema_mask` must be one of {SCHEMA_MASKS}, got {self.schema_mask!r}.")
        if self.constrained_decoding != (self.schema_mask == "sampler"):
            raise SettingsError(
                f"`constrained_decoding={self.constrained_decoding}` does not go with `schema_mask={self.schema_mask!r}`: a "
                "token that a constraint forced was no decision of the policy, and only the sampler knows which were. Set "
                '`schema_mask="sampler"` with constrained decoding, and another without.'
            )
        if self.constrained_decoding and self.importance_sampling_level != "token":
            raise SettingsError(
                '`constrained_decoding` needs `importance_sampling_level="token"`, got '
                f"{self.importance_sampling_level!r}: over a sequence, ratios would weigh down just those whose format is weak."
            )
        for name in ("schema_mask_min_prob", "schema_mask_weight", "min_unforced_fraction"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise SettingsError(f"`{name}` must be between 0 and 1, got {value}.")
        if self.min_unforced_tokens < 0:
            raise SettingsError(f"`min_unforced_tokens` must be 0 or more, got {self.min_unforced_tokens}.")

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

    def make_grammars(self, renderer: Renderer) -> TurnGrammars | None:
        """
        The grammars that turns are sampled under, or told syntax from choices by.

        Args:
            renderer (`Renderer`):
                Knows how the policy's calls are written.

        Returns:
            [`TurnGrammars`] or `None`: The grammars, if they are needed.
        """
        if self.schema_mask not in ("grammar", "sampler"):
            return None
        return TurnGrammars(
            renderer.tokenizer,
            end_of_turn_ids=renderer.end_of_turn_ids,
            chat_template_kwargs=renderer.chat_template_kwargs,
        )

    def make_schema_mask(self, renderer: Renderer, grammars: TurnGrammars | None) -> SchemaMask | None:
        """
        What masks the syntax of tool calls.

        Args:
            renderer (`Renderer`):
                Knows how the policy's calls are written.
            grammars ([`TurnGrammars`], *optional*):
                From [`make_grammars`].

        Returns:
            [`SchemaMask`] or `None`: The mask, if there is to be one. Raises [`SettingsError`] if the format of the
            policy's calls is not known.
        """
        if self.schema_mask == "off":
            return None
        rule = MaskRule(
            min_prob=self.schema_mask_min_prob,
            mask_trigger=self.mask_trigger,
            min_unforced_tokens=self.min_unforced_tokens,
            min_unforced_fraction=self.min_unforced_fraction,
        )
        if grammars is not None:
            return SchemaMask((SamplerRoles if self.constrained_decoding else GrammarRoles)(grammars), rule)
        syntax = SyntaxRoles(
            renderer.tokenizer,
            end_of_turn_ids=renderer.end_of_turn_ids,
            chat_template=renderer.chat_template,
            chat_template_kwargs=renderer.chat_template_kwargs,
        )
        if not syntax.is_supported:
            raise SettingsError(
                "The chat template writes tool calls in a way that `schema_mask` cannot read, so nothing could be masked. "
                'Set `schema_mask="off"`.'
            )
        return SchemaMask(lambda segment, tools: syntax.roles(segment.token_ids, tools), rule)

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
