"""Trains for two steps in a process of its own and pushes to the Hub that the environment names."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from datasets import Dataset
from helpers.runs import settings
from helpers.sums import ROWS, SERVER
from peft import LoraConfig

from mcp_grpo import MCPGRPOTrainer, exact_answer, summarize


TELLER = Path(__file__).with_name("teller.py")
PLANTED = ("CANARY_GITHUB_PAT", "CANARY_JWT", "CANARY_SLACK_WEBHOOK", "CANARY_PIN_CODE", "CANARY_DATABASE")
ARGUMENTS = ("c4nary-arg", "c4nary-password", "c4nary.header.1", "c4n4ry9Zq7Lm2Xw8Pt", "c4n4ryInThePath77x")


def refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError(f"Trackio was told to upload: {kwargs}")


def main(model: str, output_dir: str) -> None:
    planted = {name.removeprefix("CANARY_"): value for name, value in os.environ.items() if name in PLANTED}
    arguments = ["-e", f"API_KEY={ARGUMENTS[0]}", "--db", f"postgresql://ann:{ARGUMENTS[1]}@h/d"]
    arguments += [
        "--header",
        f"Authorization: Bearer {ARGUMENTS[2]}",
        ARGUMENTS[3],
        f"https://h/mcp/{ARGUMENTS[4]}/sse",
    ]
    env = {"SUMS_KEY": os.environ["CANARY_SUMS_KEY"]}
    servers = {
        "sums": {"command": sys.executable, "args": [str(SERVER)], "env": env},
        "teller": {"command": sys.executable, "args": [str(TELLER), *arguments], "env": env | planted},
    }
    if find_spec("trackio"):
        import trackio

        trackio.sync = trackio.freeze = refuse
    (Path(output_dir) / "notes.txt").write_text("mine: " + os.environ["CANARY_NOTE"])
    rows = [{**row, "family": "addition", "difficulty": "easy", "servers": ["sums"]} for row in ROWS]
    args = settings(
        Path(output_dir),
        push_to_hub=True,
        hub_model_id="somebody/sums",
        hub_strategy="checkpoint",
        hub_token=os.environ["CANARY_TOKEN"],
        cassette=f"{output_dir}/calls.jsonl",
        save_strategy="steps",
        save_steps=1,
        hub_always_push=True,
        log_completions=True,
        report_to=None,
        advantage_mode="hybrid",
        beta=0.05,
        ref_sync="ema",
        num_generations=4,
        per_device_train_batch_size=4,
    )
    lora = LoraConfig(r=4, target_modules="all-linear")
    with MCPGRPOTrainer(
        model, exact_answer, args, Dataset.from_list(rows), servers=servers, peft_config=lora
    ) as trainer:
        held_out = Dataset.from_list(rows[:2])
        before = summarize(trainer.roll_out(held_out))
        trainer.train()
        trainer.add_results(before, summarize(trainer.roll_out(held_out)))
        trainer.push_to_hub(dataset_name="somebody/sums-tasks")


if __name__ == "__main__":
    main(*sys.argv[1:3])
