// Which view is shown, and what keeps it up to date.
import { Curves } from "./curves.js";
import { h, replace, route } from "./dom.js";
import { List } from "./list.js";
import { refreshRuns, store } from "./store.js";
import { Viewer } from "./viewer.js";

const VIEWS = { curves: Curves, trajectories: List, trajectory: Viewer };
const EVERY = 1500; // milliseconds

const main = document.getElementById("main");
const live = document.getElementById("live");
let view = null, path = null, isBusy = false, isWanted = false;

// The token has become a cookie; in the address it would be copied along.
if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", location.pathname + location.hash);

async function refresh() {
  if (isBusy) {
    isWanted = true;
    return;
  }
  isBusy = true;
  try {
    await refreshRuns();
    show();
    await view.refresh();
    document.title = `${view.title()} · mcp-grpo`;
    const isRunning = store.runs.some((each) => each.state === "running" && each.quiet_seconds < 600);
    live.className = "live on";
    live.textContent = isRunning ? "live" : "up to date";
  } catch (error) {
    live.className = "live off";
    live.textContent = "not connected";
    if (!store.isLoaded) replace(main, h("div", { class: "empty" }, h("h2", {}, "The dashboard does not answer"), h("p", {}, String(error.message))));
    else if (!(error instanceof TypeError)) console.error(error);
  } finally {
    isBusy = false;
    if (isWanted) {
      isWanted = false;
      refresh();
    }
  }
}

function show() {
  const wanted = route().path in VIEWS ? route().path : "curves";
  if (wanted === path && view) return;
  view?.destroy();
  path = wanted;
  view = new VIEWS[path]();
  replace(main, view.element);
  for (const [name, tab] of [["curves", "tab-curves"], ["trajectories", "tab-trajectories"]]) {
    const isHere = name === path || (name === "trajectories" && path === "trajectory");
    if (isHere) document.getElementById(tab).setAttribute("aria-current", "page");
    else document.getElementById(tab).removeAttribute("aria-current");
  }
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", () => {
  const isOther = route().path !== path;
  if (isOther) scrollTo(0, 0);
  refresh();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
setInterval(() => { if (!document.hidden) refresh(); }, EVERY);
refresh();
