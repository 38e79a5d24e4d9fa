"""
Trains on several processes, one run after the other. Arguments: the model, the output folder, and in JSON the arguments of
`train` for each run; the results of a run are in the folder of its name.
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parent.parent))

from datasets import Dataset
from helpers.ranks import share_weights_on_cpu
from helpers.sums import ROWS, SERVER, TEMPLATE_KWARGS
from peft import LoraConfig
from torch.distributed.tensor import DTensor

from mcp_grpo import MCPGRPOConfig, MCPGRPOTrainer, Trajectory, exact_answer
from mcp_grpo.learning import shared_prompts
from mcp_grpo.learning.advantages import hybrid


hybrid.WARMUP_BATCHES = 0  # `advantage_mode="hybrid"` relies on the value head at once


def train(
    model: str,
    folder: Path,
    dying_rank: str | None = None,
    has_adapter: bool = True,
    resumes: bool | str = False,
    share_prompts: bool | None = None,
    paying_rank: str | None = None,
    num_tasks: int = len(ROWS),
    holds_until: int | None = None,
    judges: bool = False,
    **changes: Any,
) -> None:
    """
    Trains two steps, or goes on from the last checkpoint or another one, and writes what came of it. One rank may pay single turns
    in its first batch. The last one may have a call that is answered only after some batches. A policy may be judged before training.
    """
    shared_prompts.SHARE_PROMPTS = share_prompts
    folder.mkdir(exist_ok=True)
    rewards, attempted = [], []

    def reward(trajectory: list[Trajectory], **kwargs: Any) -> Any:
        rewards.append(exact_answer(trajectory))
        attempted.append([each.task.task_id for each in trajectory])
        if len(rewards) == holds_until:
            (folder / "go").touch()
        if paying_rank is None:
            return rewards[-1]
        first = 0.1 if rank == paying_rank and len(rewards) == 1 else -0.1
        return [[first] * (t.num_turns - 1) + [answer] for t, answer in zip(trajectory, rewards[-1], strict=True)]

    rank = os.environ["RANK"]
    if "deepspeed" in changes:
        import deepspeed

        # It would compile a faster communication for minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo")  # on a CPU `accelerate` leaves it out
    config = MCPGRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_completion_length=400,
        max_turns=3,
        **{
            "per_device_train_batch_size": 4,
            "num_generations": 8,
            "max_steps": 2,
            "learning_rate": 1e-2,
            "save_strategy": "no",
            **changes,
        },
        report_to="none",
        logging_steps=1,
        chat_template_kwargs=TEMPLATE_KWARGS,
    )
    faults = ["--die"] if rank == dying_rank else []
    if holds_until is not None and rank == str(int(os.environ["WORLD_SIZE"]) - 1):
        faults = ["--hold", str(folder)]
    server = {"command": sys.executable, "args": [str(SERVER), *faults]}
    with MCPGRPOTrainer(
        model,
        reward,
        config,
        Dataset.from_list([{**ROWS[0], "task_id": f"sum-{i}"} for i in range(num_tasks)]),
        eval_dataset=Dataset.from_list([{**row, "family": row["task_id"]} for row in ROWS]) if judges else None,
        servers={"sums": server},
        peft_config=LoraConfig(r=4, target_modules="all-linear") if has_adapter else None,
    ) as trainer:
        num_shared = [0]

        def note(_: Any, args: Any, kwargs: Any) -> None:
            num_shared[0] += "prompt_tree" in kwargs

        trainer.model.register_forward_pre_hook(note, with_kwargs=True)
        trainer.train(resume_from_checkpoint=resumes or None)
    parameters = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad or ".ref." in n}
    is_sharded = any(isinstance(p, DTensor) for p in parameters.values())
    if "deepspeed" in changes:
        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            is_sharded = any(p.ds_numel > p.ds_tensor.numel() for p in parameters.values())
            parameters = {n: p.detach().clone() for n, p in parameters.items()}
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parameters.items()}
    result = {
        "rewards": rewards,
        "history": trainer.state.log_history,
        "weights": {n: p.double().sum().item() for n, p in whole.items()},
        "attempted": attempted,
        "tasks": [t.task_id for t in trainer._batch.tasks],
        "credit": [trainer._credit.mode, trainer._credit.gamma, trainer._credit.sentence],
        "is_sharded": is_sharded,
        "num_shared": num_shared[0],
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(result))


model, folder, runs = sys.argv[1:]
for name, changes in json.loads(runs).items():
    with share_weights_on_cpu() if "fsdp" in changes else nullcontext():
        train(model, Path(folder, name), **changes)
