"""The quickstart, watched in a real browser from before it starts until it has ended."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.dashboards import CHROMIUM, Dashboard


playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


ROOT = Path(__file__).parents[3]
LONG = 240_000  # milliseconds; importing the trainer takes a part of it


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed on this system")
def test_the_quickstart_is_seen_from_start_to_end(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "recipes" / "quickstart.py"), "--max_steps", "3", "--num_held_out", "6"]
    expect = playwright.expect
    with Dashboard(tmp_path) as dashboard, playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(dashboard.url)
        expect(page.locator(".empty")).to_contain_text("There is no run in")
        page.evaluate("window.isTheSamePage = true")
        training = subprocess.Popen(
            [*command, "--output_dir", str(tmp_path / "quickstart")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            run = page.locator(".runs li")
            plot = page.locator('figure[data-chart="Reward"] .plot')
            for step in (1, 2, 3):
                expect(plot).to_have_attribute("aria-label", _up_to(step), timeout=LONG)
                if step < 3:
                    expect(run).to_contain_text("running")
            expect(run).to_contain_text("ended · step 3 of 3", timeout=LONG)
            page.locator("#tab-trajectories").click()
            expect(page.locator(".said")).to_have_text("192 of 192 trajectories")
            page.locator(".rows a").first.click()
            expect(page.locator(".tokens .token").first).to_be_visible()
            assert page.evaluate("window.isTheSamePage")
        finally:
            training.communicate()
            browser.close()


def _up_to(step: int) -> re.Pattern[str]:
    return re.compile(f"^Reward, up to step {step}:")
