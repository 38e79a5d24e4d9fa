"""Settings as other trainers call them, and configurations with sections: what each is here, where that is certain."""

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mcp_grpo.config import removed_problems


_OTHERS: Mapping[str, str] = {
    # The model and its adapter
    "model_name_or_path": (
        "model model_name model_path model_id base_model pretrain model.name model.path model.id model.pretrained"
    ),
    "model_revision": "revision",
    "dtype": "torch_dtype",
    "attn_implementation": "attention_implementation",
    "use_peft": "use_lora lora.enabled peft.enabled",
    "lora_r": "lora_rank lora.rank peft.rank",
    "lora_target_modules": "target_modules",
    "gradient_checkpointing": "grad_checkpointing",
    "load_in_4bit": "use_4bit",
    "load_in_8bit": "use_8bit",
    # Learning
    "learning_rate": "lr actor_lr actor_learning_rate policy_lr",
    "value_learning_rate": "critic_lr critic_learning_rate value_lr",
    "num_train_epochs": "epochs num_epochs total_epochs",
    "max_steps": "total_steps train_steps max_train_steps total_training_steps",
    "gradient_accumulation_steps": "grad_accum_steps grad_accumulation_steps gradient_accumulation",
    "max_grad_norm": "grad_clip clip_grad max_norm gradient_clipping",
    "lr_scheduler_type": "lr_scheduler scheduler",
    "warmup_steps": "lr_warmup_steps num_warmup_steps",
    "optim": "optimizer.name optimizer.type",
    "adam_epsilon": "optimizer.eps",
    # The objective
    "epsilon": "clip_range cliprange clip_ratio clip_epsilon clip_eps eps_clip ppo_clip clip_ratio_low eps_clip_low",
    "epsilon_high": "clip_ratio_high eps_clip_high",
    "beta": (
        "kl_penalty_coef kl_penalty_coeff kl_penalty_weight kl_coef kl_coeff kl_loss_coef kl_beta "
        "kl_weight init_kl_coef init_kl_coeff kl.coef kl.beta"
    ),
    "kl_hard_cap": "kl_cap kl.cap kl.hard_cap",
    "entropy_coef": "entropy_coeff entropy_loss_coef entropy_bonus ent_coef",
    "lam": "gae_lambda lambd lambda",
    "gamma": "gae_gamma discount discount_factor",
    "value_loss_coef": "value_coef value_loss_weight vf_coef vf_coeff critic_coef",
    "num_iterations": "ppo_epochs num_ppo_epochs update_epochs inner_epochs",
    "ref_sync_steps": (
        "ref_update_interval ref_update_freq ref_update_steps reference_update_steps "
        "reference_update_interval reference_update_freq reference.steps reference.interval"
    ),
    "ref_ema_decay": "ema_decay ref_ema reference_ema reference_ema_decay reference.decay reference.ema_decay",
    "min_unforced_fraction": "min_active_fraction min_active_frac min_unmasked_fraction",
    "bootstrap_imitation_coef": "bootstrap_bc_coef bootstrap_bc_weight bc_coef bc_weight bootstrap.bc_coef",
    "bootstrap_entropy_coef": "bootstrap_entropy_weight",
    # Trajectories
    "num_generations": (
        "group_size num_rollouts_per_prompt rollouts_per_task n_samples_per_prompt "
        "num_samples_per_prompt num_samples_per_task samples_per_prompt rollout.n"
    ),
    "max_completion_length": "max_response_length response_length",
    "max_turns": (
        "max_assistant_turns max_tool_turns max_episode_steps max_episode_turns max_steps_per_episode "
        "max_steps_per_trajectory rollout.max_steps"
    ),
    "max_result_tokens": "max_tool_response_length",
    "temperature": "sampling_temperature",
    "trajectory_timeout": "episode_timeout rollout_timeout",
    "servers": "servers_config mcp_servers mcp_config",
    "tasks": "train_data train_file train_files train_path train_data_path train_dataset dataset data.train",
    "eval_tasks": (
        "val_data val_file val_files val_path val_data_path valid_data valid_data_path validation_data "
        "eval_data eval_data_path data.val data.validation data.eval"
    ),
    # vLLM
    "use_vllm": "vllm.enabled",
    "vllm_gpu_memory_utilization": "gpu_memory_utilization",
    "vllm_max_model_length": "max_model_len vllm.max_model_len",
    "vllm_tensor_parallel_size": "tensor_parallel_size",
    "vllm_server_base_url": "vllm.base_url vllm.url",
    # Evaluation, saving, tracking
    "output_dir": "save_dir save_path checkpoint_dir ckpt_path default_local_dir",
    "save_steps": "save_interval save_every save_freq save.steps checkpoint_interval checkpoint_every",
    "save_total_limit": "max_checkpoints keep_checkpoints",
    "eval_steps": "eval_interval eval_every eval_freq test_freq evaluation.steps evaluation.interval",
    "eval_strategy": "evaluation_strategy",
    "num_eval_tasks": "num_eval_episodes",
    "logging_steps": "log_interval log_every log_freq logging_interval log_steps",
    "project": "wandb_project project_name wandb.project logging.project",
    "run_name": "experiment_name wandb_run_name wandb.name wandb.run_name",
    "seed": "random_seed",
}
"""Settings, and the names that others have for them; `section.name` for those that only mean it there."""

RENAMED: Mapping[str, str] = {name: here for here, names in _OTHERS.items() for name in names.split()}
"""Names that others have for a setting, and the setting."""

EXPLAINED: Mapping[str, str] = {
    "batch_size": "may count tasks, trajectories or rows of a pass. Here a step has `per_device_train_batch_size` trajectories "
    "per pass, times `gradient_accumulation_steps`, times processes, in groups of `num_generations`",
    "train_batch_size": "counts tasks in some trainers and trajectories in others. Here a step has "
    "`per_device_train_batch_size` trajectories per pass, times `gradient_accumulation_steps`, times processes",
    "mini_batch_size": "may be one pass (`per_device_train_batch_size`) or one update (that times "
    "`gradient_accumulation_steps`)",
    "ppo_mini_batch_size": "counts what one update learns from: set `gradient_accumulation_steps` and "
    "`steps_per_generation`",
    "micro_batch_size": "is one pass on one device: `per_device_train_batch_size`, if it counts trajectories",
    "rollout_batch_size": "counts tasks or trajectories of a batch. Set `gradient_accumulation_steps`, or "
    "`generation_batch_size` in trajectories",
    "max_new_tokens": "may limit one turn (`max_turn_tokens`) or all that follows the prompt, tool results included "
    "(`max_completion_length`)",
    "max_tokens": "may limit one turn (`max_turn_tokens`) or all that follows the prompt, tool results included "
    "(`max_completion_length`)",
    "max_length": "may count the prompt or not. `max_completion_length` limits what follows it, `vllm_max_model_length` both",
    "max_seq_length": "counts prompt and completion. `max_completion_length` limits what follows the prompt, "
    "`vllm_max_model_length` both",
    "max_prompt_length": "has no counterpart; prompts are never cut, and one that does not fit is refused before the first "
    "step",
    "num_episodes": "counts trajectories in some trainers. Set `max_steps` or `num_train_epochs`",
    "total_episodes": "counts trajectories. Set `max_steps` or `num_train_epochs`",
    "total_timesteps": "counts tokens or turns. Set `max_steps` or `num_train_epochs`",
    "warmup_ratio": "is `warmup_steps` here, which is a share of all steps if it is below 1",
    "warmup_proportion": "is `warmup_steps` here, which is a share of all steps if it is below 1",
    "num_rollouts": "may be attempts at one task (`num_generations`) or trajectories of a step "
    "(`per_device_train_batch_size` times `gradient_accumulation_steps`)",
    "ref_ema_alpha": "is `ref_ema_decay` if it is what the reference keeps of itself (0.99), and 1 minus it if it is what is "
    "mixed in (0.01)",
    "ref_update": "is `ref_sync` (`ema`, `hard` or `none`), with `ref_sync_steps` and `ref_ema_decay`",
    "use_kl": "is `beta` above 0",
    "use_kl_loss": "is `beta` above 0",
    "use_kl_in_reward": "has no counterpart; KL is a term of the loss, `beta`, and not of the reward",
    "kl_penalty": "may be a weight (`beta`) or the name of an estimator, which is always k3 here",
    "kl_loss_type": "has no counterpart; the estimator is always k3; `use_bias_correction_kl` corrects it for the sampler",
    "target_kl": "may be nats per token (`kl_target`, which raises `beta`) or per completion, or a reason to stop early",
    "kl_ctrl": "is `kl_target`, which raises `beta` where the policy drifts",
    "horizon": "has no counterpart; `kl_target` raises `beta` by at most 2 % a step",
    "adv_estimator": "is `advantage_mode`: `group` for GRPO, `gae` for a value head, `group_turn`, `hybrid`",
    "algorithm": "is `advantage_mode` (`group`, `group_turn`, `gae`, `hybrid`) and `loss_type`",
    "use_gae": 'is `advantage_mode="gae"`',
    "use_critic": 'is `advantage_mode="gae"` or `"hybrid"`',
    **dict.fromkeys(
        ("whiten_advantages", "normalize_advantages"),
        "is `scale_rewards`",
    ),
    **dict.fromkeys(
        ("value_clip", "cliprange_value", "vf_clip_range"),
        "has no counterpart; the value loss is never clipped, and `value_learning_rate` says how fast values move",
    ),
    **dict.fromkeys(
        ("ratio_min", "ratio_max", "ratio_clip_min", "ratio_clip_max"),
        "is `ratio_gate`, one number above 1 for both limits: 4.0 is 0.25 to 4.0",
    ),
    "normalize_rewards": "is `scale_rewards`",
    "norm_adv_by_std_in_grpo": 'is `scale_rewards` ("group" or "none")',
    "reward_scale": "has no counterpart; `reward_weights` weighs reward functions against each other",
    "reward_clip": "has no counterpart; clip in the reward function",
    "weight_noise": "has no counterpart, and none is needed: with one update per batch a ratio is 1 by construction, and the "
    "gradient is not 0",
    "param_noise": "has no counterpart, and none is needed: with one update per batch a ratio is 1 by construction, and the "
    "gradient is not 0",
    "force_rate": "has no counterpart; nothing is forced unless `constrained_decoding` is on",
    "strict_traj_keys": "has no counterpart; a trajectory cannot be built with fields that do not fit",
    "device": "is chosen by `accelerate launch` and the machine; `use_cpu: true` trains on a CPU",
    "device_type": "is chosen by `accelerate launch` and the machine; `use_cpu: true` trains on a CPU",
    "num_gpus": "is `num_processes` of `accelerate launch`",
    "n_gpus_per_node": "is `num_processes` of `accelerate launch`",
    "num_processes": "is an option of `accelerate launch`, not of the recipe",
    "mixed_precision": "is `bf16` or `fp16`",
    "precision": "is `dtype` for the weights, and `bf16` or `fp16` for what is computed with them",
    "reward_fn": "is `rewards`: names in `mcp_grpo.rewards`, or `module:function`",
    "reward_functions": "is `rewards`: names in `mcp_grpo.rewards`, or `module:function`",
    "reward_model": "is a reward function of yours: `rewards: [module:function]`",
    "tools": "come from the servers (`servers`); a task's column `tools` narrows them",
    "mcpservers": "is a file of its own; write it as JSON, and set `servers: FILE.json`",
    "tool_config": "is `servers`, an `mcpServers` file",
    "system_prompt": "belongs to the tasks: the first message of their `prompt`",
    "resume_from": "is `resume: true` (`--resume`), from the last checkpoint in `output_dir`",
    **dict.fromkeys(
        ("mask_min_tokens", "min_active_tokens", "min_unmasked_tokens"),
        "is always 16 with a mask, unless `min_unforced_fraction` is 0",
    ),
    "bootstrap_coef": "may be `bootstrap_imitation_coef` or `bootstrap_entropy_coef`",
    "bootstrap_weight": "may be `bootstrap_imitation_coef` or `bootstrap_entropy_coef`",
}
"""Names whose meaning here depends on what was meant, or that have no counterpart; how a sentence about each goes on."""

WITH: Mapping[str, Mapping[str, Any]] = {
    "lora_r": {"use_peft": True},
    "lora_alpha": {"use_peft": True},
    "lora_target_modules": {"use_peft": True},
    "ref_ema_decay": {"ref_sync": "ema"},
    "eval_steps": {"eval_strategy": "steps"},
}
"""What a setting is of no use without, and had no name of its own in a configuration with sections."""

_SWITCHES: Mapping[str, Mapping[Any, Mapping[str, Any]]] = {
    "device": {"cpu": {"use_cpu": True}, "cuda": {}, "gpu": {}, "auto": {}},
    "device_type": {"cpu": {"use_cpu": True}, "cuda": {}, "gpu": {}, "auto": {}},
    "use_wandb": {True: {"report_to": "wandb"}, False: {"report_to": "none"}},
    "wandb.enabled": {True: {"report_to": "wandb"}, False: {"report_to": "none"}},
    "mixed_precision": {"bf16": {"bf16": True}, "fp16": {"fp16": True}, "no": {"bf16": False}},
    "precision": {"bf16": {"bf16": True}, "fp16": {"fp16": True}},
    "schema_mask": {True: {"schema_mask": "syntax"}, False: {"schema_mask": "off"}},
    "mask.enabled": {True: {"schema_mask": "syntax"}, False: {"schema_mask": "off"}},
    "use_kl": {False: {"beta": 0.0}},
    "use_kl_loss": {False: {"beta": 0.0}},
    "use_kl_in_reward": {False: {}},
    "use_gae": {True: {"advantage_mode": "gae"}, False: {"advantage_mode": "group"}},
    "use_critic": {True: {"advantage_mode": "gae"}, False: {"advantage_mode": "group"}},
    "adv_estimator": {"grpo": {"advantage_mode": "group"}, "gae": {"advantage_mode": "gae"}},
    "algorithm": {"grpo": {"advantage_mode": "group"}},
    "force_rate": {0: {}},
    "weight_noise": {0: {}},
    "param_noise": {0: {}},
}
"""Names whose values, each by itself, are certain."""

_SERVERS = ("servers", "mcp_servers", "mcpservers")  # sections whose names are those of servers, not of settings

_PREFIXES = {
    "lora": "lora",
    "peft": "lora",
    "vllm": "vllm",
    "value": "value",
    "critic": "value",
    "kl": "kl",
    "bootstrap": "bootstrap",
    "eval": "eval",
    "evaluation": "eval",
    "save": "save",
    "logging": "logging",
    "ref": "ref",
    "reference": "ref",
    "ratio_gate": "ratio_gate",
    "gate": "ratio_gate",
    "lr_scheduler": "lr_scheduler",
    "hub": "hub",
}
"""Sections whose name is the beginning of their settings' names."""


@dataclass(kw_only=True)
class Translation:
    """
    What became of a configuration with sections.

    Args:
        settings (`dict[str, Any]`, *optional*):
            The settings, by their names here.
        notes (`list[str]`, *optional*):
            What each became.
        problems (`list[str]`, *optional*):
            What could not be translated, and why.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def translate(config: Mapping[str, Any], known: Collection[str], with_dicts: Collection[str]) -> Translation | None:
    """Translate a configuration that has sections; `with_dicts` are settings that take a mapping. `None` without sections."""
    if not any(isinstance(value, Mapping) and name not in with_dicts for name, value in config.items()):
        return None
    found = Translation()
    for path, value in _leaves(config, with_dicts):
        place = ".".join(path)
        became = _settings_of(path, value, known)
        if became is None:
            name = "mcpServers" if path[-1].lower() in _SERVERS else path[-1]
            removed = removed_problems({name: value, _prefixed(path): value})
            found.problems.append(
                f"`{place}`: {removed[0]}" if removed else f"`{place}` is no setting{explain(name, known)}"
            )
            continue
        clashing = [n for n, v in became.items() if found.settings.get(n, v) != v]
        if clashing:
            found.problems.append(f"`{place}` is `{clashing[0]}`, which is {found.settings[clashing[0]]!r} elsewhere.")
            continue
        found.settings |= became
        if list(became) != [place]:
            shown = ", ".join(f"`{name}: {_shown(each)}`" for name, each in became.items())
            found.notes.append(f"`{place}` is {shown}" if became else f"`{place}: {_shown(value)}` needs no setting")
    for name in list(found.settings):
        added = {key: value for key, value in WITH.get(name, {}).items() if key not in found.settings}
        found.settings |= added
        found.notes += [f"`{key}: {_shown(value)}` goes with `{name}`" for key, value in added.items()]
    return found


def explain(name: str, known: Collection[str]) -> str:
    """Say what a name that is no setting may be: how a sentence goes on that says that there is none."""
    key = name.lower()
    if (renamed := RENAMED.get(key)) in known:
        return f": it is `{renamed}` here."
    if key in EXPLAINED:
        return f": it {EXPLAINED[key]}."
    if near := nearest(name, known):
        return f". Did you mean {' or '.join(f'`{each}`' for each in near)}?"
    return ", and none has a name like it; `--help` lists them all."


def nearest(name: str, known: Collection[str], number: int = 3) -> list[str]:
    """Return the names that are really near to another, nearest first: spelt much alike, or with the same words."""
    scores = {each: _likeness(name.lower(), each.lower()) for each in known}
    near = sorted((each for each in known if scores[each] >= 0.8), key=lambda each: (-scores[each], each))
    return [each for each in near if scores[each] > scores[near[0]] - 0.1][:number]


def _likeness(one: str, other: str) -> float:
    """Return how alike two names are, from 0 to 1: letter by letter, or word by word in any order."""
    letters = difflib.SequenceMatcher(None, one, other).ratio()
    words, others = one.replace("-", "_").split("_"), other.replace("-", "_").split("_")
    matched = [w for w in words if difflib.get_close_matches(w, others, n=1, cutoff=0.75)]
    by_words = 2 * len(matched) / (len(words) + len(others)) if len(matched) == len(words) > 1 else 0.0
    return max(letters if letters >= 0.8 else 0.0, by_words)


def _leaves(
    config: Mapping[str, Any], with_dicts: Collection[str], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the settings in all sections, with the names of the sections they are in."""
    for name, value in config.items():
        if isinstance(value, Mapping) and name not in with_dicts and str(name).lower() not in _SERVERS:
            yield from _leaves(value, with_dicts, (*path, str(name)))
        else:
            yield (*path, str(name)), value


def _settings_of(path: tuple[str, ...], value: Any, known: Collection[str]) -> dict[str, Any] | None:
    """Return what a setting in a section is here; `None` if that is not certain."""
    name, section = path[-1].lower(), path[-2].lower() if len(path) > 1 else ""
    if isinstance(value, Mapping) and name in _SERVERS:
        return None
    for key in (f"{section}.{name}", name):
        switch = _SWITCHES.get(key, {})
        if (
            isinstance(value, (str, bool, int, float))
            and value in switch
            and (isinstance(value, bool) == any(isinstance(each, bool) for each in switch))
        ):
            return dict(switch[value])
    if RENAMED.get(f"{section}.{name}") in known:
        return {RENAMED[f"{section}.{name}"]: value}
    if _prefixed(path) in known:
        return {_prefixed(path): value}
    if name in known:
        return {name: value}
    return {RENAMED[name]: value} if RENAMED.get(name) in known else None


def _prefixed(path: tuple[str, ...]) -> str:
    """Return the name of a setting whose beginning is the name of its section."""
    return f"{_PREFIXES.get(path[-2].lower() if len(path) > 1 else '', '-')}_{path[-1].lower()}"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
