"""
Take the pictures of the dashboard that are in the documentation, from two short trainings of the quickstart.

    make screenshots

Needs Chromium and playwright. `--runs FOLDER` takes what an earlier call with `--keep FOLDER` trained.
"""

import argparse
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import uvicorn
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from mcp_grpo.dashboard.app import make_app


ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
WIDE, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}


def train(folder: Path) -> None:
    """Train twice: the quickstart as it is, and on a few of its tasks with a value head, a mask and a reference."""
    sys.path.insert(0, str(ROOT / "recipes"))
    import quickstart
    from datasets import Dataset

    from mcp_grpo import MCPGRPOTrainer, exact_answer, fault_penalty
    from mcp_grpo.monitor import METRICS_FILE, MetricsFile

    all_rows, held_out = quickstart.build_tasks(num_held_out=16)
    few = [{**row, "family": "directory"} for row in all_rows[:16]]
    more = {"beta": 0.05, "advantage_mode": "hybrid", "schema_mask": "syntax", "num_iterations": 2, "ref_sync": "ema"}
    more |= {"ref_sync_steps": 1, "eval_strategy": "steps", "eval_steps": 4, "eval_on_start": True}
    for name, rows, settings in (
        ("quickstart", all_rows, {"max_steps": 12}),
        ("value-head", few, {"max_steps": 16, **more}),
    ):
        output = folder / name
        with MCPGRPOTrainer(
            quickstart.copy_base_model(all_rows, output / "base"),
            reward_funcs=[exact_answer, fault_penalty],
            args=quickstart.make_config(output, 0, per_device_eval_batch_size=16, **settings),
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(held_out),
            servers=quickstart.SERVERS,
            peft_config=quickstart.ADAPTER,
            callbacks=[MetricsFile(output / METRICS_FILE)],
        ) as trainer:
            trainer.measure_phases()
            trainer.train()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the dashboard on a thread, and give its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(folder), lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    server.should_exit = True
    thread.join()


def take(page: Page, url: str) -> dict[str, bytes]:
    """Go through the views, and return a picture of each by its name."""
    pictures: dict[str, bytes] = {}
    page.goto(f"{url}#/curves?run=value-head&run=quickstart")
    page.locator('figure[data-chart="Reward"] canvas').wait_for()
    page.wait_for_timeout(500)  # fonts and sizes settle
    pictures["curves"] = page.screenshot()
    page.goto(f"{url}#/curves?run=value-head")
    page.locator('[data-group="Optimisation health"]').evaluate(
        "each => scrollTo(0, each.offsetTop - document.querySelector('.top').offsetHeight + 12)"
    )
    page.wait_for_timeout(500)
    pictures["health"] = page.screenshot()
    page.goto(f"{url}#/trajectories?run=value-head")
    page.locator(".rows a").nth(3).wait_for()
    pictures["list"] = page.screenshot()
    page.locator(".rows a").nth(3).click()
    page.locator(".steps").wait_for()
    page.get_by_label("Colour by").select_option("advantage")
    page.wait_for_timeout(300)
    pictures["group"] = page.screenshot()
    page.locator(".tokenview").evaluate(
        "each => scrollTo(0, each.offsetTop - document.querySelector('.top').offsetHeight - 12)"
    )
    page.locator(".tokens .token").nth(4).hover()
    pictures["tokens"] = page.screenshot()
    return pictures


def small(picture: bytes) -> Image.Image:
    """Return a picture with few colours, which takes a third of the room."""
    return Image.open(BytesIO(picture)).convert("RGB").quantize(96, dither=Image.Dither.NONE)


def main() -> None:
    """Train, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder of runs that are there")
    parser.add_argument("--keep", type=Path, help="folder to train in, instead of a temporary one")
    parser.add_argument("--out", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as name:
        folder: Any = arguments.runs or arguments.keep or Path(name)
        if arguments.runs is None:
            train(folder)
        with sync_playwright() as driver:
            photograph(driver, chromium, folder, arguments.out)


def photograph(driver: Any, chromium: str | None, folder: Path, out: Path) -> None:
    """Take all pictures of the runs in a folder."""
    browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    with served(folder) as url:
        for scheme, size, names in (
            ("light", WIDE, ("curves", "health", "list", "group", "tokens")),
            ("dark", WIDE, ("curves", "tokens")),
            ("light", PHONE, ("curves", "tokens")),
        ):
            context = browser.new_context(viewport=size, color_scheme=scheme, device_scale_factor=1)
            pictures = take(context.new_page(), url)
            for each in names:
                kind = "phone" if size is PHONE else scheme
                small(pictures[each]).save(out / f"dashboard_{each}_{kind}.png", optimize=True)
            context.close()
    browser.close()


if __name__ == "__main__":
    main()
