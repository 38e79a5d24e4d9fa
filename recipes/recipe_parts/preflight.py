"""The pre-flight: everything that can be wrong before the first step, on a machine without a GPU and without weights."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from trl import get_peft_config

from mcp_grpo import MCPGRPOConfig, MCPGRPOTrainer
from mcp_grpo.config import check_arguments
from mcp_grpo.errors import MCPGRPOError, SettingsError
from mcp_grpo.rewards.checks import check_tasks, is_computed_early, reward_name, rewardable_tasks
from mcp_grpo.rollout import RolloutEngine
from mcp_grpo.rollout.vllm_backend import chosen_weight_sync
from mcp_grpo.tasks import tasks_from_rows
from recipe_parts.requirements import missing_requirements
from recipe_parts.stand_in import QWEN3_CONTEXT, config_of, save_stand_in, tokenizer_of


T = TypeVar("T")

CHARACTERS_PER_TOKEN = 3.6  # of the desk's prompts with Qwen3's tokenizer, rounded down
# What a machine without a GPU cannot do, and what takes its place in the pre-flight.
GPU_SETTINGS: dict[str, Any] = {
    "use_vllm": False,
    "vllm_enable_sleep_mode": False,
    "vllm_server_urls": None,
    "vllm_engine_kwargs": None,
    "rollout_ahead": 0,
    "weight_sync": "auto",
    "bf16": False,
    "fp16": False,
    "tf32": None,
    "deepspeed": None,
    "fsdp": None,
    "fsdp_config": None,
    "optim": "adamw_torch",
    "cast_lm_head_to_fp32": False,
}


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """
    What a pre-flight has found.

    Args:
        problems (`tuple[str, ...]`):
            What is wrong, each with what to do.
        checked (`tuple[str, ...]`):
            What is right.
        not_run (`tuple[str, ...]`):
            What could not be checked, because something that it needs is wrong.
        left_out (`tuple[str, ...]`):
            What only the machine of the run can tell.
    """

    problems: tuple[str, ...]
    checked: tuple[str, ...]
    not_run: tuple[str, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        count = "1 thing is" if len(self.problems) == 1 else f"{len(self.problems) or 'no'} things are"
        parts = {"wrong": self.problems, "not run": self.not_run, "ok": self.checked, "left": self.left_out}
        lines = [f"  {word:<8}{each}".replace("\n", "\n          ") for word, said in parts.items() for each in said]
        return "\n".join(
            [f"The pre-flight: {count} wrong." if self.problems else "The pre-flight found nothing wrong.", *lines]
        )


class _Checks:
    """Checks made so far. One that fails does not keep another from being made."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.checked: list[str] = []
        self.not_run: list[str] = []
        self.left_out: list[str] = []
        self._failed: list[str] = []

    def run(self, name: str, check: Callable[[], T], *, needs: Sequence[str] = ()) -> T | None:
        """
        Make a check, unless one that it needs has failed.

        Args:
            name (`str`):
                What is checked.
            check (`Callable`):
                Raises what is wrong.
            needs (`Sequence[str]`, *optional*):
                Names of other checks.

        Returns:
            `Any`: What the check returns; `None` if it failed or was not made.
        """
        if missing := [need for need in needs if need in self._failed]:
            self._failed.append(name)
            self.not_run.append(f"{name}: needs {' and '.join(missing)}")
            return None
        try:
            return check()
        except (
            Exception
        ) as error:  # whatever the run would end with is a finding, and other checks are still to be made
            kind = "" if isinstance(error, MCPGRPOError) else f"{type(error).__name__}: "
            self.fail(name, f"{kind}{error}")
            return None

    def fail(self, name: str, problem: str) -> None:
        """Note something that is wrong, unless another check has said the same."""
        self._failed.append(name)
        if not any(problem in each for each in self.problems):
            self.problems.append(f"{name}: {problem}")

    def has_failed(self, *names: str) -> bool:
        """Return whether one of these checks has failed."""
        return any(name in self._failed for name in names)


def run_preflight(
    config: MCPGRPOConfig,
    model: Any,
    *,
    settings: dict[str, Any],
    train_dataset: Callable[[], Any],
    eval_dataset: Callable[[], Any],
    servers: Callable[[], Any],
    rewards: Callable[[], list[Callable[..., Any]]],
) -> Preflight:
    """
    Start the servers and build the trainer on a tiny random model in place of the weights; what a GPU is needed for is left
    out, and named.

    Args:
        config ([`MCPGRPOConfig`]):
            Settings of the run.
        model ([`~trl.ModelConfig`]):
            Model of the run.
        settings (`dict[str, Any]`):
            All settings as they were given, from [`StrictParser.parse`].
        train_dataset (`Callable`):
            Loads the tasks to train on.
        eval_dataset (`Callable`):
            Loads the tasks to judge by, or `None`.
        servers (`Callable`):
            Loads the servers.
        rewards (`Callable`):
            Loads the reward functions.

    Returns:
        [`Preflight`]: What was found, right and wrong.
    """
    checks = _Checks()
    rows, held_out = checks.run("tasks", train_dataset), checks.run("tasks to judge by", eval_dataset)
    functions, where = checks.run("rewards", rewards), checks.run("servers", servers)
    for problem in missing_requirements(config, model):
        checks.fail("packages", problem)
    if checks.run("settings", lambda: _check_settings(config, model, rows, held_out) or True):
        checks.checked.append(
            f"settings: {config.per_device_train_batch_size} trajectories per device and pass, "
            f"{config.generation_batch_size} per batch in groups of {config.num_generations}"
        )
    tokenizer, is_real = checks.run(
        "tokenizer", lambda: tokenizer_of(model.model_name_or_path, model.model_revision)
    ) or (None, False)
    if tokenizer is not None and not is_real:
        checks.left_out.append(
            f"tokenizer of {model.model_name_or_path}: not on this machine; Qwen3's chat template on bytes instead"
        )
    checks.left_out += _left_out(config, model, functions or [])
    parts = ("settings", "tokenizer", "tasks", "tasks to judge by", "rewards", "servers")
    if checks.has_failed(*parts):
        # The trainer cannot be built; what it would say about tasks and rewards can be found out without it.
        checks.run("tools", lambda: _check_tasks(config, where, [rows, held_out], functions), needs=("servers",))
    needed = (*parts, "tools")
    length = checks.run(
        "trainer",
        lambda: _trial(config, model, settings, checks, tokenizer, rows, held_out, where, functions or []),
        needs=needed,
    )
    checks.run("room for prompts", lambda: _check_room(config, length or 0, is_real, checks), needs=("trainer",))
    return Preflight(
        problems=tuple(checks.problems),
        checked=tuple(checks.checked),
        not_run=tuple(checks.not_run),
        left_out=tuple(checks.left_out),
    )


def _check_settings(config: MCPGRPOConfig, model: Any, train_dataset: Any, eval_dataset: Any) -> None:
    check_arguments(config, train_dataset, {"eval_dataset": eval_dataset})
    if (model.load_in_4bit or model.load_in_8bit) and not model.use_peft:
        raise SettingsError(
            f"`load_in_{4 if model.load_in_4bit else 8}bit` makes weights that cannot be trained, and there is no adapter on "
            "them. Set `use_peft: true`, or leave it out."
        )


def _check_tasks(config: MCPGRPOConfig, servers: Any, datasets: Sequence[Any], rewards: Any) -> None:
    """Compare the tasks with the tools and the rewards, without a trainer."""
    tasks = rewardable_tasks(rewards, *datasets)
    engine = RolloutEngine(servers, config.make_cassette() if config.replays else None)
    try:
        check_tasks(tasks, rewards, engine.catalog, engine.state_servers)
    finally:
        engine.close()


def _trial(
    config: MCPGRPOConfig,
    model: Any,
    settings: dict[str, Any],
    checks: _Checks,
    tokenizer: Any,
    train_dataset: Any,
    eval_dataset: Any,
    servers: Any,
    rewards: list[Callable[..., Any]],
) -> int:
    """Build the trainer on a tiny random model, and return the length of the longest prompt."""
    own = {field.name for field in fields(MCPGRPOConfig)}
    given = {name: value for name, value in settings.items() if name in own}
    with tempfile.TemporaryDirectory() as folder:
        stand_in = str(Path(folder, "model"))
        real = config_of(model.model_name_or_path, model.model_revision)
        context = getattr(real.get_text_config(), "max_position_embeddings", None) if real else None
        save_stand_in(stand_in, tokenizer, context)
        given |= {**GPU_SETTINGS, "use_cpu": True, "output_dir": str(Path(folder, "run")), "report_to": "none"}
        given |= {"push_to_hub": False, "model_init_kwargs": None}
        with MCPGRPOTrainer(
            stand_in,
            rewards,
            MCPGRPOConfig(**given),
            train_dataset,
            eval_dataset=eval_dataset,
            servers=servers,
            peft_config=get_peft_config(model),
        ) as trainer:
            catalog = trainer.catalog
            names = sorted({tool.server for tool in catalog.tools})
            tasks = tasks_from_rows(train_dataset)
            checks.checked += [
                f"servers: {', '.join(names)}, with {len(catalog.tools)} tools (catalog {catalog.hash[:16]})",
                "chat template: carries tool calls token by token",
                f"tasks: {len(tasks)} to train on, {len(eval_dataset) if eval_dataset else 0} to judge by; all that they name "
                "exists",
                f"rewards: {', '.join(map(reward_name, rewards))}",
            ]
            checks.run(
                "adapter",
                lambda: checks.checked.extend(
                    _checked_adapter(config, model, trainer.model, getattr(real, "quantization_config", None))
                ),
            )
            return max(len(ids) for ids in trainer._engine.prompt_ids(tasks[:64], trainer._renderer))


def _check_room(config: MCPGRPOConfig, length: int, is_real: bool, checks: _Checks) -> None:
    """Refuse a context without room for a completion after the longest prompt."""
    limit = config.vllm_max_model_length if config.use_vllm else None
    length = length if is_real else int(length / CHARACTERS_PER_TOKEN)
    about = "" if is_real else f"about (at {CHARACTERS_PER_TOKEN} characters per token) "
    room = (limit or QWEN3_CONTEXT) - length
    if room < (config.max_completion_length or 0):
        raise SettingsError(
            f"A prompt has {about}{length} tokens, and `vllm_max_model_length` is {limit}, which leaves {room} for the "
            f"completion, less than its `max_completion_length` of {config.max_completion_length}. Raise the former, or lower "
            "the latter."
        )
    checks.checked.append(
        f"prompts: {about}{length} tokens with their tools, and up to {config.max_completion_length} to follow"
    )


def _checked_adapter(config: MCPGRPOConfig, model: Any, policy: Any, saved_quantization: Any) -> list[str]:
    """What is right about the adapter and the precision of the weights below it; raised if anything is wrong."""
    if config.use_vllm:
        if model.load_in_4bit or model.load_in_8bit or saved_quantization is not None:
            policy.config.quantization_config = SimpleNamespace(
                # What is quantised already is read by vLLM as it is.
                load_in_4bit=model.load_in_4bit and saved_quantization is None,
                bnb_4bit_quant_type=model.bnb_4bit_quant_type,
                bnb_4bit_use_double_quant=model.use_bnb_nested_quant,
            )
        sync = chosen_weight_sync(config.weight_sync, policy, config.vllm_mode)
        return [f"weights: vLLM gets {'the adapter' if sync == 'adapter' else 'whole weights'} after each update"]
    return []


def _left_out(config: MCPGRPOConfig, model: Any, rewards: Sequence[Callable[..., Any]]) -> list[str]:
    """What only the machine of the run can tell."""
    words = [f"weights of {model.model_name_or_path}: a tiny random Qwen3 stands in for them"]
    if config.use_vllm:
        words.append(f"vLLM {'in process' if config.vllm_mode == 'colocate' else 'as a server'}: needs a GPU")
    if model.load_in_4bit or model.load_in_8bit:
        words.append(f"{4 if model.load_in_4bit else 8}-bit weights by bitsandbytes: need a GPU")
    if not torch.cuda.is_available() and not config.use_cpu:
        words.append("bf16: needs a GPU, or `use_cpu: true`")
    if config.push_to_hub:
        words.append("the Hub: nothing is uploaded")
    words += [
        f"reward `{reward_name(reward)}`: only called with what the policy really did"
        for reward in rewards
        if not is_computed_early(reward)
    ]
    return words
