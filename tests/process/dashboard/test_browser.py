"""The dashboard in a real browser: charts, filters, trajectories, keys, colours, widths, and text that would be code."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.dashboards import CHROMIUM, Dashboard
from helpers.recordings import attempt, call, write_about, write_batch, write_metrics


playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed on this system")

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31mred\u202egnp.exe"
NOTE = {"step": 2, "name": "no_calls", "sentence": f"No tool was called. {HOSTILE}", "is_fatal": False}
BINS = ("below_0.25", "0.25_to_0.8", "0.8_to_1", "1_to_1.2", "1.2_to_4", "above_4")


def metrics(step: int, reward: float) -> dict[str, Any]:
    found = {"step": step, "reward": reward, "rewards/exact/mean": reward, "kl/active": 0.1 * step, "kl/beta": 0.05}
    found |= {"stop/answered": 0.75, "stop/max_turns": 0.25, "tools/by_name/add/error_rate": 0.1, "ratio/p50": 1.0}
    found |= {"mask/in_loss_fraction": 0.9, "align/score": 0.99, "my/own": 3.0, "tools/by_name/<b>x/error_rate": 0.2}
    return found | {f"ratio/histogram/{name}": 1 / len(BINS) for name in BINS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    for name, gain in (("first", 0.1), ("second", 0.2)):
        write_metrics(folder / name, *(metrics(step, gain * step) for step in range(1, 5)))
        write_metrics(folder / name, {"step": 4, "eval_reward": 0.5})
    write_about(folder / "first", health=[NOTE], state="ended")
    write_about(folder / "second", state="ended")
    for step in range(3):
        rows = [
            attempt(
                step,
                row,
                rewards={"exact": float(row % 2)},
                calls=[call("add" if step else "sub"), call("mul", turn=1)],
            )
            for row in range(4)
        ]
        rows += [attempt(step, row, task_id=f"many-{step}-{row}", family="many") for row in range(4, 34)]
        rows[-1]["stop_reason"] = "max_turns"
        write_batch(folder / "first", rows)
    os.utime(folder / "second" / "run.json", (1, 1))
    os.utime(folder / "second" / "metrics.jsonl", (1, 1))
    return folder


@pytest.fixture(scope="module")
def dashboard(folder: Path) -> Iterator[Dashboard]:
    with Dashboard(folder) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # root has no other way
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any, dashboard: Dashboard) -> Iterator[Callable[..., Any]]:
    """Opens views of the dashboard; after the test, nothing has gone wrong in them, and nothing else was asked for."""
    contexts, wrong = [], []

    def open_view(view: str = "", url: str = dashboard.url, *, quiet: bool = True, **how: Any) -> Any:
        contexts.append(browser.new_context(**how))
        contexts[-1].set_default_timeout(20_000)
        page = contexts[-1].new_page()
        page.on("dialog", lambda dialog: (wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
        if quiet:
            page.on("pageerror", lambda error: wrong.append(f"error {error}"))
            page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
            origin = url.split("?")[0].rstrip("/")
            page.on(
                "request", lambda asked: None if asked.url.startswith(origin) else wrong.append(f"asked {asked.url}")
            )
        page.goto(url + view)
        return page

    yield open_view
    for context in contexts:
        context.close()
    assert wrong == []


def expect(found: Any) -> Any:
    playwright.expect.set_options(timeout=20_000)  # other tests may run beside it
    return playwright.expect(found)


def chart(page: Any, title: str) -> Any:
    return page.locator(f'figure[data-chart="{title}"]')


def has_overflow(page: Any) -> bool:
    return page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")


def test_curves_of_a_run_its_health_and_its_trajectories_are_a_click_apart(opened: Any) -> None:
    page = opened()
    expect(chart(page, "Reward").locator("canvas")).to_be_visible()
    expect(chart(page, "Reward").locator(".legend")).to_contain_text("0.400")
    expect(chart(page, "Reward").locator(".legend")).to_have_text("reward0.400evaluation0.500")
    expect(page.locator(".health li")).to_have_text([f"step 2No tool was called. {shown(HOSTILE)}"])
    page.get_by_role("link", name="Trajectories").first.click()
    expect(page.locator(".said")).to_have_text("102 of 102 trajectories")
    page.locator(".rows a").first.click()
    expect(page.locator(".about h2")).to_contain_text("sum-1")
    expect(page.locator(".attempt")).to_have_count(4)
    expect(page.locator(".tokens .token")).to_have_count(6)


def shown(text: str) -> str:
    return text.replace("\x1b", "␛").replace("\u202e", "�")


@pytest.mark.full
def test_only_charts_of_what_was_logged_are_there(opened: Any) -> None:
    page = opened()
    for title in ("Reward", "KL divergence", "Mask", "Alignment", "Histogram of ratios", "Errors by tool"):
        expect(chart(page, title)).to_be_visible()
    expect(chart(page, "Explained variance")).to_have_count(0)
    expect(chart(page, "GPU memory")).to_have_count(0)
    expect(chart(page, "Errors by tool").locator(".legend")).to_contain_text("<b>x")
    for words in ("target0.400", "cap3"):
        expect(chart(page, "KL divergence").locator(".legend")).to_contain_text(words)
    other = chart(page, "my/own")
    expect(other).not_to_be_visible()
    page.get_by_text("Everything else").click()
    expect(other.locator(".legend")).to_contain_text("3")
    bins = chart(page, "Histogram of ratios").locator(".bin")
    expect(bins).to_have_count(len(BINS))
    assert bins.evaluate_all("all => all.map(each => each.className)") == [
        "bin", "bin edge-gate", "bin edge-clip", "bin", "bin edge-clip", "bin edge-gate"
    ]  # fmt: skip


@pytest.mark.full
def test_runs_are_compared_by_overlay_with_their_names(opened: Any) -> None:
    page = opened()
    expect(chart(page, "Reward").locator(".legend li")).to_have_count(1)
    page.get_by_role("checkbox", name="second").check()
    legend = chart(page, "Reward").locator(".legend")
    expect(legend.locator("li")).to_have_count(2)
    expect(legend).to_contain_text("first")
    expect(legend).to_contain_text("second")
    expect(legend).to_contain_text("0.800")
    assert "run=second" in page.url  # and the address can be kept
    page.get_by_role("checkbox", name="first").uncheck()
    expect(legend.locator("li")).to_have_count(1)
    page.get_by_role("checkbox", name="second").uncheck()
    expect(page.locator(".empty")).to_contain_text("No run is chosen.")


@pytest.mark.full
def test_filters_and_pages(opened: Any) -> None:
    page = opened("#/trajectories?run=first")
    said = page.locator(".said")
    expect(said).to_have_text("102 of 102 trajectories")
    page.get_by_role("button", name="Next").click()
    expect(page.locator(".pages span")).to_have_text("51–100")
    page.get_by_label("Family").select_option("sums")
    expect(said).to_have_text("12 of 102 trajectories")
    page.get_by_label("Reward from").fill("0.5")
    expect(said).to_have_text("6 of 102 trajectories")
    page.get_by_label("Step from").fill("1")
    expect(said).to_have_text("4 of 102 trajectories")
    page.get_by_label("Tool").select_option("sub")
    expect(said).to_have_text("0 of 102 trajectories")
    page.reload()  # what was chosen is in the address
    expect(page.get_by_label("Step from")).to_have_value("1")
    page.get_by_role("button", name="Clear").click()
    expect(said).to_have_text("102 of 102 trajectories")
    page.get_by_label("Task").fill("MANY-2-3")
    expect(said).to_have_text("4 of 102 trajectories")
    page.get_by_label("Stop reason").select_option("max_turns")
    expect(said).to_have_text("1 of 102 trajectories")


@pytest.mark.full
def test_tokens_are_coloured_by_what_is_chosen_and_tell_their_numbers(opened: Any) -> None:
    page = opened("#/trajectory?run=first&step=1&row=1")
    tokens, numbers = page.locator(".tokens .token"), page.locator(".numbers")
    expect(tokens).to_have_text(["<call>", " add", "<end>", "⏎\n5⏎\n", "It", " is 5"])
    page.get_by_label("Colour by").select_option("in the loss")
    assert [each.split()[1] for each in tokens.evaluate_all("all => all.map(each => each.className)")] == [
        "seen", "seen", "seen", "environment", "seen", "seen"
    ]  # fmt: skip
    for words in ("sampler log-prob", "trainer log-prob", "ratio", "value", "advantage", "author and role"):
        before = colours(tokens)
        page.get_by_label("Colour by").select_option(words)
        assert colours(tokens) != before
    tokens.nth(1).hover()
    expect(numbers).to_contain_text("sampler log-prob-0.2000")
    expect(numbers).to_contain_text("ratio1.1052")
    expect(numbers).to_contain_text("advantage0.5000")
    tokens.nth(3).hover()
    expect(numbers).to_contain_text("tools and template")
    expect(numbers).not_to_contain_text("advantage")
    timeline = page.locator(".attempt.chosen .timeline li")
    expect(timeline).to_have_count(4)
    assert "500 ms of generation" in timeline.first.get_attribute("title")
    expect(page.locator(".steps li")).to_have_count(3)
    expect(page.locator(".steps .path .new")).to_have_text(["add → mul ×4"])
    page.locator(".steps li").nth(2).locator("a").nth(3).click()
    expect(page.locator(".about .facts")).to_contain_text("step 2, attempt 4")


def colours(tokens: Any) -> list[str]:
    return tokens.evaluate_all("all => all.map(each => getComputedStyle(each).backgroundColor)")


@pytest.mark.full
def test_everything_can_be_done_by_keyboard(opened: Any) -> None:
    page = opened()
    expect(chart(page, "Reward")).to_be_visible()

    def tab_to(test: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate(f"(at => {test})(document.activeElement)"):
                style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert style != "none"  # where one is can be seen
                return
        raise AssertionError(f"The keyboard does not reach {test}")

    tab_to("at.closest('figure')?.dataset.chart === 'Reward'")
    page.keyboard.press("Home")
    expect(chart(page, "Reward").locator(".legend")).to_contain_text("step 1")
    page.keyboard.press("ArrowRight")
    expect(chart(page, "Reward").locator(".legend")).to_contain_text("step 2")
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    page.locator(".brand").focus()
    tab_to("at.id === 'tab-trajectories'")
    page.keyboard.press("Enter")
    expect(page.locator(".rows a").first).to_be_visible()
    tab_to("at.matches('.rows a')")
    page.keyboard.press("Enter")
    tab_to("at.matches('.tokens')")
    page.keyboard.press("End")
    expect(page.locator(".numbers")).to_contain_text("6 of 6")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".numbers")).to_contain_text("5 of 6")
    page.keyboard.press("ArrowUp")
    expect(page.locator(".numbers")).to_contain_text("4 of 6")
    page.keyboard.press("]")
    expect(page.locator(".about .facts")).to_contain_text("attempt 2")


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_is_readable_in_light_and_dark_and_at_the_width_of_a_phone(opened: Any, scheme: str, width: int) -> None:
    page = opened(viewport={"width": width, "height": 800}, color_scheme=scheme)
    for view, there in (
        ("#/curves", 'figure[data-chart="Reward"] canvas'),
        ("#/trajectories?run=first", ".rows a"),
        ("#/trajectory?run=first&step=1&row=1", ".tokens .token"),
    ):
        page.evaluate("hash => { location.hash = hash; }", view)
        expect(page.locator(there).first).to_be_visible()
        assert not has_overflow(page), view
        found = {place: contrast(page, place) for place in ("body", ".top nav a", "main small", "main p")}
        assert found["body"]
        assert found["body"] > 7
        assert found[".top nav a"]
        assert min(filter(None, found.values())) >= 4.5, (view, found)


def contrast(page: Any, place: str) -> float | None:
    """Return the contrast of a text to what is behind it, as accessibility guidelines count it; `None` if it is not there."""
    # The element is looked up where it is measured: a page that follows runs may draw it anew at any time.
    return page.evaluate(
        """place => {
        const element = document.querySelector(place);
        if (!element) return null;
        const light = (colour) => {
            const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map((x) => (x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        let behind = element;
        while (/rgba\\(0, 0, 0, 0\\)/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
        const both = [light(getComputedStyle(element).color), light(getComputedStyle(behind).backgroundColor)].sort((a, b) => b - a);
        return (both[0] + 0.05) / (both[1] + 0.05);
    }""",
        place,
    )


@pytest.mark.full
def test_the_colours_can_be_chosen_and_are_kept(opened: Any) -> None:
    page = opened(color_scheme="light")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    page.locator("#theme").click()
    expect(page.locator("#theme")).to_have_attribute("aria-label", "Colours: dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark != before
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark


def test_text_of_tools_and_models_is_inert(opened: Any, folder: Path) -> None:
    half = f"half \ud83d {HOSTILE}"
    plain = half.encode("utf-8", "replace").decode()
    long = plain + "".join(f"<iframe src=//evil.example/{n}></iframe>" for n in range(40))
    hostile = attempt(
        task_id=plain,
        family="<i>family</i>",
        prompt=half,
        messages=json.dumps([{"role": "assistant", "content": half}, {"role": "assistant", "content": {"a": half}}]),
        calls=[call("<img src=x onerror=alert(3)>", text=long, kind="tool_error", arguments={"a": half})],
        answer=plain,
        error=plain,
        stop_reason="max_turns",
        rewards={"<svg onload=alert(4)>": 1.0},
        states=json.dumps({"server": half}),
        tokens=[
            b"<script>alert(5)</script>",
            b"\x1b[31m",
            "\u202e".encode(),
            b"<img src=x onerror=alert(6)>",
            b"\xed\xa0\xbd",
        ],
        turns=[0, 0, 0, -1, 1],
    )
    name = "<img src=x onerror=alert(7)>"
    write_batch(folder / name, [hostile, {**hostile, "row": 1}])
    write_batch(folder / name, [{**hostile, "step": 1}])
    write_metrics(folder / name, {"step": 1, "reward": 1.0, "<script>alert(8)</script>": 1.0, "stop/<b>": 1.0})
    write_about(folder / name, health=[{**NOTE, "is_fatal": True}], state="ended")
    try:
        page = opened()
        expect(page.locator(".runs .name").first).to_have_text(name)
        page.get_by_role("checkbox", name=name).check()
        expect(page.locator(".health").get_by_text("<script>alert(1)</script>").first).to_be_visible()
        page.evaluate("name => { location.hash = '#/trajectories?run=' + encodeURIComponent(name); }", name)
        expect(page.locator(".rows .task").first).to_contain_text("<img src=x onerror=alert(2)>")
        page.locator(".rows a").first.click()
        expect(page.locator(".tokens .token").first).to_have_text("<script>alert(5)</script>")
        expect(page.locator(".tokens .token").nth(1)).to_have_text("␛[31m")
        expect(page.locator(".about .prompt")).to_contain_text("half � <script>alert(1)</script>")
        page.locator(".result summary").first.click()
        expect(page.locator(".result details > span").first).to_contain_text("<iframe src=//evil.example/39>")
        expect(page.locator(".steps li")).to_have_count(2)
        text = page.evaluate("document.body.innerText")
        assert not set(text) & {"\x1b", "\u202e", "\ud83d"}
        assert page.evaluate("document.querySelectorAll('main script, main iframe, main img, main svg').length") == 0
        page.wait_for_timeout(200)  # a picture that fails to load would call what it names now
    finally:
        shutil.rmtree(folder / name)


@pytest.mark.full
def test_what_a_run_writes_shows_without_a_reload(opened: Any, folder: Path) -> None:
    live = folder / "growing"
    page = opened("#/curves?run=growing")
    try:
        expect(page.locator(".empty")).to_be_visible()
        write_about(live, max_steps=3)
        expect(page.get_by_role("checkbox", name="growing")).to_be_checked()
        expect(page.locator(".empty")).to_contain_text("Nothing has been logged yet.")
        write_metrics(live, {"step": 1, "reward": 0.125})
        legend = chart(page, "Reward").locator(".legend")
        expect(legend).to_contain_text("0.125")
        page.evaluate("window.isTheSamePage = true")
        write_metrics(live, {"step": 2, "reward": 0.25, "entropy": 1.5}, {"step": 2, "batch/reward": 0.75})
        expect(legend).to_contain_text("0.250")
        expect(chart(page, "Entropy").locator(".legend")).to_contain_text("1.500")
        expect(page.locator(".ahead")).to_contain_text("its reward is 0.750")
        write_about(
            live, max_steps=3, health=[{**NOTE, "sentence": "It has collapsed.", "is_fatal": True}], state="ended"
        )
        expect(page.locator(".health .fatal")).to_contain_text("The run was stopped. It has collapsed.")
        write_batch(live, [attempt()])
        page.locator("#tab-trajectories").click()
        page.get_by_label("Run").select_option("growing")
        expect(page.locator(".said")).to_have_text("1 of 1 trajectories")
        write_batch(live, [attempt(1), attempt(1, 1)])
        expect(page.locator(".said")).to_have_text("3 of 3 trajectories")
        assert page.evaluate("window.isTheSamePage")
    finally:
        shutil.rmtree(live)


def test_another_page_cannot_read_it(opened: Any, dashboard: Dashboard, browser: Any) -> None:
    with Dashboard(Path(__file__).parent) as other:  # another origin, of the same site
        page = opened(url=other.url, quiet=False)
        # The page's own policy would keep it from asking; a hostile page has none.
        page.route(
            "**/*", lambda route: route.fulfill(body="<!doctype html><title>evil</title>", content_type="text/html")
        )
        page.goto(f"{other.url}evil")
        asked = """async url => {
            const ask = (how) => fetch(url + 'api/runs', how).then((answer) => `${answer.type} ${answer.status}`, () => 'refused');
            const loaded = await new Promise((done) => {
                const script = document.createElement('script');
                script.onload = () => done('loaded'); script.onerror = () => done('refused'); script.src = url + 'api/runs';
                document.head.append(script);
            });
            return [await ask({}), loaded];
        }"""
        page.unroute("**/*")
        assert page.evaluate(asked, dashboard.url) == ["refused", "refused"]
        frame = page.evaluate(
            """url => new Promise((done) => {
            const frame = document.createElement('iframe');
            frame.onload = () => done(frame.contentDocument === null); frame.src = url;
            document.body.append(frame);
        })""",
            dashboard.url,
        )
        assert frame  # it is not shown in the frame of another page
        assert page.frames[1].locator("main").count() == 0


@pytest.mark.full
def test_a_dashboard_for_other_machines_opens_with_its_token(opened: Any, folder: Path) -> None:
    with Dashboard(folder, "--host", "0.0.0.0") as other:
        port_and_token = other.url.rpartition(":")[2]
        page = opened(url=f"http://127.0.0.1:{port_and_token}")
        expect(chart(page, "Reward")).to_be_visible()
        assert "token" not in page.url  # it has become a cookie
        page.reload()
        expect(chart(page, "Reward")).to_be_visible()
        without = opened(url=f"http://127.0.0.1:{port_and_token.split('/')[0]}/", quiet=False)
        expect(without.locator("body")).to_contain_text("A token is needed.")


@pytest.mark.full
def test_the_page_says_that_the_dashboard_has_ended(opened: Any, folder: Path) -> None:
    with Dashboard(folder) as other:
        page = opened(url=other.url, quiet=False)
        expect(chart(page, "Reward")).to_be_visible()
        other.process.kill()
        expect(page.locator("#live")).to_have_text("not connected")
