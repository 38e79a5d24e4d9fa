"""Settings that do not go with the trainer's other arguments: refused before anything is started."""

import os
from collections.abc import Mapping
from typing import Any, cast

from datasets import Dataset

from mcp_grpo.config import MCPGRPOConfig, own_settings
from mcp_grpo.errors import SettingsError


def check_without_servers(args: MCPGRPOConfig) -> None:
    """
    Refuse what would silently do nothing without servers.

    Args:
        args (`MCPGRPOConfig`):
            The trainer's configuration.

    Raises:
        [`SettingsError`]: If there is such a thing.
    """
    problems = _without_use(args, "servers", "is for training on MCP servers, and there are none. Pass `servers`")
    if args.truncation == "mask":
        problems.append(
            "`truncation='mask'` is for training on MCP servers, and there are none. Pass `servers`, or use TRL's "
            "`mask_truncated_completions`."
        )
    if problems:
        raise SettingsError("\n".join(problems))


def _without_use(args: MCPGRPOConfig, need: str, why: str) -> list[str]:
    """Say which settings were changed that do nothing without something that is not there."""
    return [
        f"`{one.name}={getattr(args, one.name)!r}` {why}, or leave it at {one.default!r}."
        for one in own_settings()
        if need in one.metadata.get("needs", ()) and getattr(args, one.name) != one.default
    ]


def check_arguments(args: Any, train_dataset: Any, kwargs: Mapping[str, Any]) -> None:
    """
    Refuse, before anything is started, what would not train correctly on MCP servers.

    Args:
        args (`MCPGRPOConfig`):
            The trainer's configuration.
        train_dataset (`Dataset` or `IterableDataset`, *optional*):
            Its tasks. `None` if it is not to train.
        kwargs (`Mapping[str, Any]`):
            Its other arguments.

    Raises:
        [`SettingsError`]: If there is such a thing; the message has all of them, and says what to set instead.
    """
    if not isinstance(args, MCPGRPOConfig):
        raise SettingsError(f"With `servers`, `args` must be an `MCPGRPOConfig`, got {type(args).__name__}.")
    problems = [
        f"`{name}` and `servers` both say where tools come from. Pass only `servers`."
        for name in ("tools", "rollout_func", "environment_factory")
        if kwargs.get(name) is not None
    ]
    # The sampler's log-probabilities are the old ones of the ratio: they must be those of the policy itself.
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "generation_kwargs": None}
    problems += [
        f"`{name}={getattr(args, name)!r}` samples from another distribution than the one that is trained, so that ratios "
        f"would be wrong. Leave it at {value!r}; use `temperature` to explore more or less."
        for name, value in neutral.items()
        if getattr(args, name) not in (value, None)
    ]
    if not args.use_vllm:
        problems += _without_use(args, "vllm", "is for sampling with vLLM. Set `use_vllm=True`")
    problems += [message for is_refused, message in _refusals(args, train_dataset, kwargs) if is_refused]
    num_tasks = cast("int", args.generation_batch_size) // cast("int", args.num_generations)
    if isinstance(train_dataset, Dataset) and len(train_dataset) < num_tasks:
        problems.append(
            f"A batch holds {num_tasks} tasks (`generation_batch_size` {args.generation_batch_size} / `num_generations` "
            f"{args.num_generations}), but the dataset has only {len(train_dataset)}: not one batch could be made, and "
            "training would end at once. Add tasks, lower `per_device_train_batch_size`, or raise `num_generations`."
        )
    if problems:
        raise SettingsError("\n".join(problems))


def _is_fsdp1(args: MCPGRPOConfig) -> bool:
    """Return whether the policy is sharded by the first FSDP, as the settings or `accelerate launch` have it."""
    if args.fsdp:
        return int(cast(Any, args.fsdp_config or {}).get("version", 2)) == 1
    return os.environ.get("ACCELERATE_USE_FSDP") == "true" and os.environ.get("FSDP_VERSION", "1") == "1"


def _share(args: MCPGRPOConfig) -> int:
    """Return the trajectories of a batch on each process."""
    return args.per_device_train_batch_size * cast("int", args.steps_per_generation)


def _refusals(
    args: MCPGRPOConfig, train_dataset: Any, kwargs: Mapping[str, Any]
) -> list[tuple[bool | int | None, str]]:
    """Return what cannot be: a condition, and what to say where it holds."""
    return [
        (
            args.temperature <= 0,
            f"`temperature` must be positive, got {args.temperature}: a group needs varied attempts.",
        ),
        (
            args.use_transformers_continuous_batching,
            "`use_transformers_continuous_batching` generates for a batch at a time, and trajectories differ. Set "
            "`use_vllm=True` for continuous batching, or leave both off.",
        ),
        (
            _is_fsdp1(args) and not args.use_vllm,
            "FSDP 1 cannot generate with `servers`: its processes must call the model equally often, and trajectories "
            "differ. Set `use_vllm=True`, or use FSDP 2 (`fsdp_version: 2`), or DDP.",
        ),
        (
            not args.ds3_gather_for_generation and not args.use_vllm,
            "With `servers`, `ds3_gather_for_generation` must stay `True`: trajectories differ in length.",
        ),
        (
            args.use_vllm and args.vllm_mode == "colocate" and args.vllm_tensor_parallel_size > 1,
            "`vllm_tensor_parallel_size` above 1 in process makes all of its processes generate in step, and trajectories "
            'differ. Set `vllm_mode="server"` and start the server with `--tensor-parallel-size`.',
        ),
        (
            args.use_vllm and args.constrained_decoding and args.temperature != 1,
            f"`constrained_decoding` with vLLM needs `temperature=1.0`, got {args.temperature}: what a constraint cuts away "
            "can only be told at that temperature.",
        ),
        (
            bool(args.vllm_structured_outputs_regex),
            "`vllm_structured_outputs_regex` constrains the policy without telling the trainer. Use "
            "`constrained_decoding=True`.",
        ),
        (
            args.max_staleness and args.vllm_mode == "colocate" and args.vllm_enable_sleep_mode,
            "`max_staleness` above 0 needs the engine while the policy trains, and `vllm_enable_sleep_mode` puts it to sleep then. "
            'Set one of them off, or `vllm_mode="server"`.',
        ),
        (
            args.max_staleness
            and (args.num_iterations > 1 or args.gradient_accumulation_steps != args.steps_per_generation),
            f"`max_staleness` above 0 needs one update per batch: `num_iterations` ({args.num_iterations}) must be 1, and "
            f"`gradient_accumulation_steps` ({args.gradient_accumulation_steps}) equal to `steps_per_generation` "
            f"({args.steps_per_generation}).",
        ),
        (
            args.max_staleness > 1 and _share(args) % cast("int", args.num_generations),
            f"`max_staleness` above 1 needs whole groups on each process, but a batch has {_share(args)} trajectories there "
            f"(`per_device_train_batch_size` {args.per_device_train_batch_size} * `steps_per_generation` "
            f"{args.steps_per_generation}), which is no multiple of `num_generations` ({args.num_generations}). Change one of them, "
            "or set `max_staleness=1`.",
        ),
        (
            args.max_staleness > 1 and not isinstance(train_dataset, Dataset | None),
            "`max_staleness` above 1 looks up the tasks that were under way when a run is resumed, so the dataset must be a "
            "`Dataset`, not a stream. Set `max_staleness=1`.",
        ),
        (
            args.use_vllm and bool(args.vllm_server_urls) and args.vllm_mode != "server",
            '`vllm_server_urls` are of no use with `vllm_mode="colocate"`. Set `vllm_mode="server"`.',
        ),
        (
            args.gradient_accumulation_steps % cast("int", args.steps_per_generation),
            f"`gradient_accumulation_steps` ({args.gradient_accumulation_steps}) must be a multiple of "
            f"`steps_per_generation` ({args.steps_per_generation}), so that every update holds whole groups.",
        ),
        (
            args.task_choice != "uniform" and not isinstance(train_dataset, Dataset | None),
            f'`task_choice="{args.task_choice}"` draws other tasks from the dataset, so it must be a `Dataset`, not a stream.',
        ),
        (
            bool(args.dynamic_sampling) and not isinstance(train_dataset, Dataset | None),
            "`dynamic_sampling` draws other tasks from the dataset, so it must be a `Dataset`, not a stream.",
        ),
        (
            args.mask_truncated_completions,
            "`mask_truncated_completions` only knows completions without an end-of-turn token. With `servers`, set "
            '`truncation="mask"` instead, which knows what ran out of turns, too.',
        ),
        (
            args.remove_unused_columns,
            "`remove_unused_columns=True` would drop the tasks' columns. Set it to `False`.",
        ),
    ]
