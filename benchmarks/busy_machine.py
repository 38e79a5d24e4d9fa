"""
Ask how much slower a training step on a CPU gets when others use its cores.

    python benchmarks/busy_machine.py [--json figures.json]

The quickstart's model trains on its two real servers, first alone, then beside as many busy processes as there are cores
(two at least). Each contender is a process of its own, since what OpenMP does is settled when torch is loaded:

- `ours`: what the library chooses;
- `spinning`: a thread per core, which spin while they wait for each other.

Steps are those of the quickstart. Beside the busy processes there are as many as begin within 40 seconds, and none is waited
for longer than that. Exits with 1 if ours is more than 3 times slower beside the busy processes than alone. Three minutes at
most on two quiet cores; nothing is downloaded. On cores that others use, too, the ratio is that of more than two busy
processes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


MAX_RATIO = 3.0
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends with whoever started it
NUM_BUSY = max(2, os.cpu_count() or 1)
PATIENCE = 40.0  # seconds of steps, alone and beside busy processes
CONTENDERS: dict[str, dict[str, str]] = {
    "ours": {},
    "spinning": {"OMP_NUM_THREADS": str(os.cpu_count()), "OMP_WAIT_POLICY": "ACTIVE"},
}

Result = dict[str, Any]


def main() -> None:
    """Run all contenders, or one of them in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="steps alone, and as many beside busy processes")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--contender", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender is not None:
        train(arguments.steps, arguments.contender)
        return
    results = {name: run(name, arguments.steps) for name in CONTENDERS}
    show(results)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    if slowdown(results["ours"]) > MAX_RATIO:
        sys.exit(f"Ours was more than {MAX_RATIO:g} times slower beside {NUM_BUSY} busy processes than alone.")


def run(name: str, num_steps: int) -> Result:
    """Run one contender in a process of its own."""
    unset = {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "KMP_BLOCKTIME", "GOMP_SPINCOUNT"}
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--contender", str(path), "--steps", str(num_steps)]
        done = subprocess.run(
            command, env=environment | CONTENDERS[name], capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr[-4000:]}")
        return json.loads(path.read_text())


def train(num_steps: int, path: Path) -> None:
    """Train alone and beside busy processes, and write the seconds of each step and how threads were set."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))
    import quickstart  # sets how threads wait, before it loads torch
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback

    from mcp_grpo import MCPGRPOTrainer, exact_answer
    from mcp_grpo.quickstart.tasks import build_tasks

    class Steps(TrainerCallback):
        """Notes how long steps take, and stops when there were enough or they have taken too long."""

        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.start = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.start = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seconds.append(time.monotonic() - self.start)
            control.should_training_stop = len(self.seconds) > num_steps or sum(self.seconds) > PATIENCE

    rows, _ = build_tasks()
    load, alone, beside = os.getloadavg()[0], Steps(), Steps()

    def write() -> None:
        # The first step alone has to wake up what the others find awake.
        result = {"alone": alone.seconds[1:] or alone.seconds, "beside": beside.seconds, "load": load}
        waiting = os.environ.get("OMP_WAIT_POLICY", "default")
        path.write_text(json.dumps({**result, "threads": torch.get_num_threads(), "waiting": waiting}))

    def give_up() -> None:
        write()
        os._exit(0)

    with tempfile.TemporaryDirectory() as folder:
        config = quickstart.make_config(Path(folder), seed=0, max_steps=1000, disable_tqdm=True)
        with MCPGRPOTrainer(
            str(quickstart.WARM_START),
            reward_funcs=exact_answer,
            args=config,
            train_dataset=Dataset.from_list(rows),
            servers=quickstart.SERVERS,
            peft_config=quickstart.ADAPTER,
        ) as trainer:
            trainer.add_callback(alone)
            trainer.train()
            trainer.remove_callback(alone)
            trainer.add_callback(beside)
            timer = threading.Timer(PATIENCE, give_up)
            timer.daemon = True
            with busy(NUM_BUSY):
                timer.start()
                trainer.train()
                timer.cancel()
    write()


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Keep as many processes busy."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def slowdown(result: Result) -> float:
    """Return how many times slower steps were beside busy processes than alone, at least."""
    return beside(result) / statistics.median(result["alone"])


def beside(result: Result) -> float:
    """Return the seconds of a step beside busy processes, at least."""
    return statistics.median(result["beside"] or [PATIENCE])


def show(results: dict[str, Result]) -> None:
    """Print a table."""
    cores = f"{os.cpu_count()} cores, with a load of {results['ours']['load']:.1f} before it began"
    table = Table(title=f"Seconds per step alone and beside {NUM_BUSY} busy processes, on {cores}")
    for column in ("", "threads", "waiting", "alone", "beside", "times slower", "times ours beside"):
        table.add_column(column)
    for name, result in results.items():
        more = "" if result["beside"] else "more than "
        seconds = shown(result["beside"]) if result["beside"] else f"{more}{PATIENCE:.0f}"
        ratios = (slowdown(result), beside(result) / beside(results["ours"]))
        times = [f"{more}{ratio:.1f}" for ratio in ratios]
        table.add_row(name, str(result["threads"]), result["waiting"], shown(result["alone"]), seconds, *times)
    Console().print(table)


def shown(seconds: Sequence[float]) -> str:
    """Return the median, and all of them."""
    return f"{statistics.median(seconds):.2f} ({', '.join(f'{one:.2f}' for one in seconds)})"


if __name__ == "__main__":
    main()
