"""
Ask how an adapter's weights best get to vLLM in process: merged into the whole model, or as the adapter alone.

    python benchmarks/weight_sync.py [--device cuda] [--shapes 0.6b 8b] [--eager] [--json figures.json]

Merging sends every weight of the model; the engine then samples as fast as it can. An adapter (LoRA, r = 16 on all linear
layers) is small, but the engine computes it beside the model with every token. For each shape and each way, in a process of
its own, it measures seconds and bytes of sending the weights, each time after they have changed, and how many tokens per
second the engine samples after it: 64 sequences of 128 tokens.

It also says which of the two `weight_sync="auto"` picks. That is the adapter in 16 bits, where merging rounds small changes
away; on a GPU it exits with 1 if a step of `--step-tokens` sampled tokens then takes half as long again. It always exits with 1 if a part fails, after all others have run.
Models are random, and nothing is downloaded.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fixed_turns import (
    GPU_SHARE,
    MAX_CONTEXT,
    SHAPES,
    device_name,
    engine_settings,
    markdown,
    prepare,
    random_model,
    run_alone,
    sample_all,
    save_random_model,
    say,
    synchronize,
    versions,
)
from measuring import Check


KINDS = ("merge", "adapter")
RANK = 16
PROMPT_LENGTH = 64
PART_TIME = 400.0  # seconds for one shape and one way
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"shapes": ["0.6b", "8b"], "sequences": 64, "tokens": 128},
    "cpu": {"shapes": ["tiny"], "sequences": 8, "tokens": 16},
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of the benchmark; see `--help`."""

    device: str
    shapes: list[str]
    sequences: int
    tokens: int
    syncs: int
    repeats: int
    step_tokens: int
    eager: bool
    json: Path | None
    part: str | None


def parse_arguments() -> Arguments:
    """The command line."""
    import torch

    parser = argparse.ArgumentParser(description="Ask how an adapter's weights best get to vLLM in process.")
    add = parser.add_argument
    add("--device", choices=list(DEFAULTS), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--shapes", nargs="+", choices=list(SHAPES), help="of the model; 0.6b 8b on a GPU, tiny on a CPU")
    add("--sequences", type=int, help="sampled at once; 64 on a GPU, 8 on a CPU")
    add("--tokens", type=int, help="of a sequence; 128 on a GPU, 16 on a CPU")
    add("--syncs", type=int, default=5, help="times that weights are sent after the first time")
    add("--repeats", type=int, default=3, help="of sampling; the median is shown")
    add("--step-tokens", type=int, default=64 * 1024, help="sampled tokens of a training step")
    add("--eager", action="store_true", help="without graphs, which start faster and sample slower")
    add("--json", type=Path, help="file for all figures")
    add("--part", help=argparse.SUPPRESS)
    found = parser.parse_args()
    parser.set_defaults(**DEFAULTS[found.device])
    return Arguments(**vars(parser.parse_args()))


def measure(arguments: Arguments, shape: str, kind: str, folder: Path) -> dict[str, Any]:
    """One shape and one way. Call it in a fresh process."""
    import torch
    from accelerate import Accelerator
    from helpers.families import family_tokenizer
    from peft import LoraConfig, get_peft_model

    from mcp_grpo.sampling.vllm_backend import VLLMBackend, VLLMSettings, chosen_weight_sync

    # The engine makes up its own weights: what is in the folder is only the shape.
    path = save_random_model(folder / "model", shape, arguments.device, weights=False)
    base = random_model(shape, arguments.device)
    base.name_or_path = base.config._name_or_path = path
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
    adapter = [weight for weight in model.parameters() if weight.requires_grad]
    start = time.perf_counter()
    backend = VLLMBackend(
        settings=VLLMSettings(
            weight_sync=kind,
            engine={**engine_settings(arguments.device, arguments.eager), "load_format": "dummy"},
            folder=folder,
        ),
        model=model,
        accelerator=Accelerator(cpu=arguments.device == "cpu"),
        processing_class=family_tokenizer("qwen3"),
        mode="colocate",
        gpu_memory_utilization=GPU_SHARE,
        max_model_length=MAX_CONTEXT,
        max_num_seqs=arguments.sequences,
    )
    start_seconds = time.perf_counter() - start
    try:
        sync_seconds = []
        for _ in range(arguments.syncs + 1):
            with torch.no_grad():
                for weight in adapter:
                    weight.add_(torch.randn_like(weight), alpha=1e-3)
            synchronize(arguments.device)
            start = time.perf_counter()
            backend.sync_weights()
            synchronize(arguments.device)
            sync_seconds.append(time.perf_counter() - start)
        generator = backend.make_generator([])
        prompts = [[(7 * i + j) % 200 for j in range(PROMPT_LENGTH)] for i in range(arguments.sequences)]
        rates = []
        for _ in range(arguments.repeats + 1):
            backend.llm.reset_prefix_cache()
            start = time.perf_counter()
            sampled = sum(len(each.token_ids) for each in sample_all(generator, prompts, arguments.tokens))
            rates.append(sampled / (time.perf_counter() - start))
    finally:
        backend.close()
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "start_seconds": start_seconds,
        "first_sync_seconds": sync_seconds[0],
        "sync_seconds": sync_seconds[1:],
        "bytes": backend.bytes_sent,
        "tokens_per_second": rates[1:],
        "auto": chosen_weight_sync("auto", model, "colocate"),
        "device": device_name(arguments.device),
        "versions": versions(),
    }


def run_part(arguments: Arguments) -> None:
    """What a process of its own does."""
    shape, kind, output = (arguments.part or "").split(",")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(output).write_text(json.dumps(measure(arguments, shape, kind, Path(folder))))


def measure_all(arguments: Arguments) -> tuple[dict[tuple[str, str], dict[str, Any]], list[str]]:
    """All shapes and ways, one process after another, and what went wrong."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    problems: list[str] = []
    passed_on = ["--device", arguments.device, *["--eager"] * arguments.eager]
    for name in ("sequences", "tokens", "syncs", "repeats"):
        passed_on += [f"--{name}", str(getattr(arguments, name))]
    with tempfile.TemporaryDirectory() as folder:
        for shape in arguments.shapes:
            for kind in KINDS:
                output, log = Path(folder, f"{shape}-{kind}.json"), Path(folder, f"{shape}-{kind}.log")
                start = time.perf_counter()
                part = ["--part", f"{shape},{kind},{output}", *passed_on]
                problem = run_alone(Path(__file__), part, log, PART_TIME)
                if problem is None and output.exists():
                    found[shape, kind] = json.loads(output.read_text())
                    say(f"  {shape}, {kind}: measured in {time.perf_counter() - start:.0f} s")
                else:
                    problems.append(f"{shape}, {kind}: {problem}")
                    say(f"FAILED: {problems[-1]}")
    return found, problems


MAX_SLOWER = 1.5


def step_seconds(figures: dict[str, Any], num_tokens: int) -> float:
    """One sync, and so many tokens."""
    rate = statistics.median(figures["tokens_per_second"])
    return statistics.median(figures["sync_seconds"]) + num_tokens / rate


def judge(arguments: Arguments, found: dict[tuple[str, str], dict[str, Any]]) -> list[Check]:
    """Whether the way that `auto` picks is not much slower than the other."""
    checks = []
    for shape in arguments.shapes:
        if all((shape, kind) in found for kind in KINDS):
            seconds = {kind: step_seconds(found[shape, kind], arguments.step_tokens) for kind in KINDS}
            picked = found[shape, KINDS[0]]["auto"]
            shown = ", ".join(f"{kind} {value:.2f} s" for kind, value in seconds.items())
            claim = f'{shape}: "auto" picks {picked!r}, at most {MAX_SLOWER} times as long for {arguments.step_tokens:,} tokens'
            checks.append(Check(claim=claim, holds=seconds[picked] <= MAX_SLOWER * min(seconds.values()), got=shown))
    return checks


def crossing(shape: str, found: dict[tuple[str, str], dict[str, Any]]) -> str:
    """From how many tokens on merging pays."""
    if not all((shape, kind) in found for kind in KINDS):
        return ""
    merge, adapter = (found[shape, kind] for kind in KINDS)
    dearer = statistics.median(merge["sync_seconds"]) - statistics.median(adapter["sync_seconds"])
    slower = 1 / statistics.median(adapter["tokens_per_second"]) - 1 / statistics.median(merge["tokens_per_second"])
    if dearer * slower <= 0:
        return f"{shape}: {'merging' if slower > 0 else 'the adapter'} is faster however many tokens are sampled."
    faster = "merging" if slower > 0 else "the adapter"
    return f"{shape}: {faster} is faster from {dearer / slower:,.0f} sampled tokens per step on."


def table(found: dict[tuple[str, str], dict[str, Any]], step_tokens: int) -> str:
    """All that was measured."""
    header = [
        "shape",
        "weights",
        "sync, s: median (all)",
        "MB",
        "tokens/s: median (all)",
        f"{step_tokens:,} tokens, s",
    ]
    rows = []
    for (shape, kind), figures in found.items():
        syncs, rates = figures["sync_seconds"], figures["tokens_per_second"]
        rows.append(
            [
                shape,
                kind,
                f"{statistics.median(syncs):.3f} ({', '.join(f'{each:.3f}' for each in syncs)})",
                f"{figures['bytes'] / 1e6:,.1f}",
                f"{statistics.median(rates):,.0f} ({', '.join(f'{each:,.0f}' for each in rates)})",
                f"{step_seconds(figures, step_tokens):.2f}",
            ]
        )
    return markdown(header, rows)


def main(arguments: Arguments) -> list[str]:
    """
    Run the benchmark.

    Returns:
        `list[str]`: A sentence for each part that failed, and on a GPU for each wrong choice of `auto`.
    """
    found, problems = measure_all(arguments)
    checks = judge(arguments, found)
    if found:
        graphs = "without graphs" if arguments.eager or arguments.device == "cpu" else "with graphs"
        what = f"{arguments.sequences} sequences of {arguments.tokens} tokens, {graphs}"
        say("", f"{next(iter(found.values()))['device']}, {what}, LoRA r={RANK}", "")
        say(table(found, arguments.step_tokens), "", *[crossing(shape, found) for shape in arguments.shapes])
    is_judged = arguments.device == "cuda"
    for check in checks:
        verdict = ("PASS" if check.holds else "FAIL") if is_judged else "no verdict on a CPU"
        say(f"{verdict}: {check.claim}: {check.got}")
    if arguments.json is not None:
        figures = {
            "arguments": {name: str(v) if isinstance(v, Path) else v for name, v in asdict(arguments).items()},
            "figures": {", ".join(key): value for key, value in found.items()},
            "checks": [asdict(check) for check in checks],
            "problems": problems,
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    failures = [f"It does not hold that {check.claim}: {check.got}." for check in checks if not check.holds]
    return problems + (failures if is_judged else [])


if __name__ == "__main__":
    prepare()
    if (given := parse_arguments()).part is not None:
        run_part(given)
    elif failures := main(given):
        sys.exit("\n".join(failures))
