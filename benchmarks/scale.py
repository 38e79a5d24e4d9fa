"""
Ask where training saturates with more GPUs: a simulation of steps on 1, 8 and 64, from what was measured on one.

    python benchmarks/scale.py [--gpus 1 8 64] [--latencies 0.03 tail0.45]

It needs no GPU and takes seconds. What goes in was measured on an H200 with a Qwen3-0.6B in shape (docs/results.md): how long a step of
vLLM takes by the number of sequences, what the loop of a trajectory computes beside it, how many tokens per second loss and scoring
train on, how long the weights take to reach vLLM. What goes in without having been measured is what cables carry. The simulation
then follows every turn of every trajectory: it waits for a tool, or is one of the sequences that the engine steps.

First it is shown beside rollouts that were measured with the library as it is, one run each. Then it has two layouts:

- in process: each GPU samples its share of the trajectories, waits for the slowest of all, and trains on its share
- servers: half of the GPUs sample with vLLM servers for the next step (`max_staleness=1`), while the other half train

and two ways to grow: as many trajectories a step as on one GPU for each GPU, or 512 a step on however many. The last table has the bytes that a
step sends to each engine: an adapter, or whole weights.
"""

import argparse
import random
import statistics
from collections.abc import Callable, Sequence

import numpy as np
from fixed_turns import draw_latencies, markdown, say


# Seconds of a step of the engine by its sequences, without tools: 256 in a row took 0.96 and 5.14 s with 64 and 512, in one run, and 0.55 s with 8, in another.
SEQUENCES, STEP_SECONDS = (8, 64, 512), (0.55 / 256, 0.96 / 256, 5.14 / 256)
LOOP_SECONDS = (
    0.00058  # that the engine waits for the loop, by turn: 6.33 s less 5.14 s, of 512 trajectories with four
)
TRAINED_PER_SECOND = 71_000  # tokens of trajectories, by loss and scoring: 64 with 2,856 each in 2.56 s
SYNC_SECONDS, OTHER_SECONDS, ADAPTER_BYTES = 0.29, 0.09, 40e6
MEASURED_ROLLOUT, MEASURED_STEP = 2.85, 5.81  # of the run that these are of: 64 trajectories on the desk's servers
CABLE = 20e9  # bytes per second between GPUs of different machines, about 200 Gbit/s with what gets lost; not measured
TOKENS_OF_A_TRAJECTORY = 2856
# Tokens of the turns of a solution, for each family of the desk: the median of its training tasks, with Qwen3's tokenizer.
FAMILIES = (
    (23, 25, 10),
    (23, 35, 13),
    (47, 57, 35),
    (94, 113, 8),
    (23, 52, 14),
    (41, 22, 17),
    (39, 23, 23, 10),
    (23, 53, 492, 10),
    (45, 56, 9),
    (57, 60, 75, 8),
    (23, 52, 13),
    (22, 52, 104, 10),
    (23, 53, 10),
    (22, 28, 13),
)
GROUP = 8
PER_GPU, FIXED = 64, 512
MEASURED = {  # seconds
    ("0", 8): 0.58,
    ("0", 64): 1.29,
    ("0", 512): 6.33,
    ("tail0.45", 8): 2.81,
    ("tail0.45", 64): 4.89,
    ("tail0.45", 512): 11.51,
}
# Layers, width, width of keys and values, feed-forward width, words, of Qwen3.
SHAPES = {
    "0.6B": (28, 1024, 2048, 1024, 3072, 151936),
    "1.7B": (28, 2048, 2048, 1024, 6144, 151936),
    "4B": (36, 2560, 4096, 1024, 9728, 151936),
    "8B": (36, 4096, 4096, 1024, 12288, 151936),
    "32B": (64, 5120, 8192, 1024, 25600, 151936),
}
RANK = 16


def step_seconds(num_sequences: int) -> float:
    """Return the seconds of a step of the engine; beyond what was measured, along the last slope."""
    if num_sequences <= SEQUENCES[-1]:
        return float(np.interp(num_sequences, SEQUENCES, STEP_SECONDS))
    slope = (STEP_SECONDS[-1] - STEP_SECONDS[-2]) / (SEQUENCES[-1] - SEQUENCES[-2])
    return STEP_SECONDS[-1] + slope * (num_sequences - SEQUENCES[-1])


def roll_out(turns: Sequence[Sequence[int]], latencies: Sequence[Sequence[float]]) -> float:
    """
    Return the seconds that one engine takes for some trajectories.

    Args:
        turns (`Sequence[Sequence[int]]`):
            Tokens of each turn, by trajectory.
        latencies (`Sequence[Sequence[float]]`):
            Seconds of the tools between them.
    """
    now, turn = 0.0, np.zeros(len(turns), dtype=int)
    left = np.array([each[0] for each in turns])
    wakes = np.zeros(len(turns))  # when a tool has answered; for ever once a trajectory has ended
    began = np.ones(len(turns), dtype=bool)  # turns that the engine has not been given yet
    while np.isfinite(wakes).any():
        awake = wakes <= now
        if not awake.any():
            now = float(wakes.min())
            continue
        now += LOOP_SECONDS * int((awake & began).sum())
        began &= ~awake
        seconds = step_seconds(int(awake.sum()))
        asleep = wakes[~awake & np.isfinite(wakes)]
        until = int((asleep.min() - now) // seconds) + 1 if len(asleep) else left.max()
        num = max(1, min(int(left[awake].min()), until))
        now += num * seconds
        left[awake] -= num
        for index in np.flatnonzero(awake & (left <= 0)):
            turn[index] += 1
            if turn[index] == len(turns[index]):
                wakes[index] = np.inf
            else:
                wakes[index] = now + latencies[index][turn[index] - 1]
                left[index], began[index] = turns[index][turn[index]], True
    return now


def draw_turns(number: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Draw the turns of trajectories like those of the desk, in groups of the same task."""
    groups = rng.choices(FAMILIES, k=-(-number // GROUP))
    return [turns for turns in groups for _ in range(GROUP)][:number]


def sampled(num_trajectories: int, num_engines: int, latency: str) -> float:
    """Return the seconds until the slowest of several engines has rolled out its share, the mean of three batches."""
    shares = [num_trajectories // num_engines + (each < num_trajectories % num_engines) for each in range(num_engines)]
    found = []
    for batch in range(3):
        rng = random.Random(batch)
        seconds = []
        for engine, share in enumerate(shares):
            latencies = draw_latencies(latency, share, max(map(len, FAMILIES)), seed=1000 * batch + engine)
            seconds.append(roll_out(draw_turns(share, rng), latencies))
        found.append(max(seconds))
    return statistics.mean(found)


def trained(num_trajectories: int, num_gpus: int) -> float:
    """Return the seconds of loss and scoring, with the gradients of an adapter summed over GPUs."""
    ring = 2 * ADAPTER_BYTES * (num_gpus - 1) / num_gpus / CABLE
    return num_trajectories * TOKENS_OF_A_TRAJECTORY / num_gpus / TRAINED_PER_SECOND + ring


def in_process(num_trajectories: int, num_gpus: int, latency: str) -> tuple[float, float, float]:
    """Return the seconds of sampling, training and a step, each GPU doing both."""
    sampling, training = sampled(num_trajectories, num_gpus, latency), trained(num_trajectories, num_gpus)
    return sampling, training, sampling + training + SYNC_SECONDS + OTHER_SECONDS


def on_servers(num_trajectories: int, num_gpus: int, latency: str) -> tuple[float, float, float]:
    """Return the same with half of the GPUs for servers, which sample ahead; one that sends to many engines sends to one after another."""
    half = max(1, num_gpus // 2)
    sampling, training = sampled(num_trajectories, half, latency), trained(num_trajectories, half)
    sync = SYNC_SECONDS + OTHER_SECONDS + half * ADAPTER_BYTES / CABLE
    return sampling, training, max(sampling, training) + sync


LAYOUTS: dict[str, Callable[[int, int, str], tuple[float, float, float]]] = {
    "in process": in_process,
    "servers, ahead": on_servers,
}


def compare() -> None:
    """Show the simulation beside what was measured."""
    rows = []
    for (latency, number), seconds in MEASURED.items():
        found = roll_out([[64] * 4] * number, draw_latencies(latency, number, 3))
        rows.append([latency, str(number), f"{seconds:.2f}", f"{found:.2f}", f"{found / seconds:.2f}"])
    say(markdown(["latency", "trajectories", "measured, s", "simulated, s", "of measured"], rows), "")
    sampling, _, step = in_process(PER_GPU, 1, "0")
    say(
        f"A step of {PER_GPU} on the desk: {step:.1f} s simulated, {MEASURED_STEP} s measured; its rollout {sampling:.1f} and {MEASURED_ROLLOUT} s.",
        "",
    )


def grow(gpus: Sequence[int], latencies: Sequence[str]) -> None:
    """Print what steps take on more GPUs."""
    rows = []
    for latency in latencies:
        for name, layout in LAYOUTS.items():
            for growing in (True, False):
                alone: float | None = None
                for number in gpus:
                    if number == 1 and layout is on_servers:
                        continue
                    trajectories = PER_GPU * number if growing else FIXED
                    sampling, training, step = layout(trajectories, number, latency)
                    rate = trajectories / step / number
                    alone = alone or rate
                    tokens = trajectories * TOKENS_OF_A_TRAJECTORY / step
                    cells = [
                        f"{sampling:.1f}",
                        f"{training:.1f}",
                        f"{step:.1f}",
                        f"{trajectories / step:.0f}",
                        f"{tokens:,.0f}",
                    ]
                    rows.append([latency, name, str(trajectories), str(number), *cells, f"{rate / alone:.2f}"])
    columns = ["latency", "layout", "trajectories a step", "GPUs", "sampling, s", "training, s", "step, s"]
    say(markdown([*columns, "trajectories/s", "tokens/s", "of the first, per GPU"], rows), "")


def count_bytes() -> None:
    """Print what a step sends to each engine."""
    rows = []
    for name, (layers, width, heads, keys, inner, words) in SHAPES.items():
        linear = [(width, heads), (width, keys), (width, keys), (heads, width), *[(width, inner)] * 2, (inner, width)]
        adapter = layers * RANK * sum(a + b for a, b in linear)
        whole = layers * sum(a * b for a, b in linear) + words * width * (1 if width < 4096 else 2)
        seconds = [f"{2 * count / CABLE:.3f}" for count in (adapter, whole)]
        rows.append([name, f"{2 * adapter / 1e6:.0f}", seconds[0], f"{2 * whole / 1e6:.0f}", seconds[1]])
    head = ["Qwen3", f"adapter of rank {RANK}, MB", "s by cable", "whole weights, MB", "s by cable"]
    say(markdown(head, rows))


def main() -> None:
    """Simulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--latencies", nargs="+", default=["0.03", "tail0.45"])
    arguments = parser.parse_args()
    compare()
    grow(arguments.gpus, arguments.latencies)
    count_bytes()


if __name__ == "__main__":
    main()
