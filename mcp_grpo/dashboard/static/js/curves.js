// The first view: runs to choose from, what was found wrong with them, and their curves.
import { GROUPS, isDrawn } from "./charts.js";
import { duration, h, link, number, replace, route } from "./dom.js";
import { Histogram, LineChart, colour, keysOf } from "./plots.js";
import { refreshMetrics, run, store } from "./store.js";

const MAX_AT_FIRST = 1;
const QUIET = 600; // seconds, after which a run that has not ended may have been killed

export class Curves {
  constructor() {
    this.charts = new Map();
    this.smoothing = Number(sessionStorage.getItem("smoothing") ?? 0);
    this.runs = h("ul", { class: "runs" });
    this.health = h("section", { class: "card health", "aria-label": "Health" });
    this.body = h("div", {});
    this.empty = h("div", { class: "empty" });
    const slider = h("input", {
      type: "range", min: "0", max: "0.95", step: "0.05", value: this.smoothing, "aria-label": "Smoothing",
      oninput: () => {
        this.smoothing = Number(slider.value);
        sessionStorage.setItem("smoothing", slider.value);
        this.draw();
      },
    });
    this.element = h(
      "div", { class: "curves" },
      h("aside", { "aria-label": "Runs" }, h("h2", {}, "Runs"), this.runs, h("label", { class: "smoothing" }, "Smoothing", slider)),
      h("div", { class: "content" }, this.empty, this.health, this.body),
    );
    this.onTheme = () => this.draw();
    addEventListener("themechange", this.onTheme);
  }

  title() {
    return this.chosen().join(", ") || "Runs";
  }

  // Runs that are looked at: those of the address, or the one that wrote last.
  chosen() {
    const named = route().query.getAll("run").filter(run);
    if (named.length || route().query.has("run")) return named;
    return [...store.runs].sort((a, b) => (a.quiet_seconds ?? Infinity) - (b.quiet_seconds ?? Infinity)).slice(0, MAX_AT_FIRST).map((each) => each.name);
  }

  async refresh() {
    const chosen = this.chosen();
    const changes = await Promise.all(chosen.map(refreshMetrics));
    const signature = JSON.stringify([chosen, store.runs.map((each) => [each.name, each.health.length, each.num_files])]);
    this.drawRuns(chosen);
    if (changes.some(Boolean) || signature !== this.signature) {
      this.signature = signature;
      this.draw();
    }
  }

  drawRuns(chosen) {
    const places = new Map(store.runs.map((each, i) => [each.name, i]));
    const focused = document.activeElement?.dataset?.run;
    replace(this.runs, store.runs.map((each) => {
      const isChosen = chosen.includes(each.name);
      const others = isChosen ? chosen.filter((name) => name !== each.name) : [...chosen, each.name];
      const box = h("input", {
        type: "checkbox", checked: isChosen, "data-run": each.name,
        onchange: () => { location.hash = others.length ? link("curves", { run: others }) : "#/curves?run="; },
      });
      const share = each.max_steps ? Math.min(1, each.step / each.max_steps) : null;
      return h(
        "li", { class: isChosen ? "chosen" : "" },
        h("label", {}, box, isChosen && chosen.length > 1 ? h("i", { class: "swatch", style: { color: colour(places.get(each.name)) }, "aria-hidden": "true" }) : null, h("span", { class: "name" }, each.name)),
        h("p", {}, state(each), ` · step ${each.step}${each.max_steps > 0 ? ` of ${each.max_steps}` : ""}`, each.reward === null ? null : [" · reward ", h("b", {}, number(each.reward))]),
        share === null ? null : h("progress", { value: String(share), max: "1", "aria-label": `Progress of ${each.name}` }),
        each.health.length ? h("p", { class: "notes" }, `${each.health.length} health ${each.health.length === 1 ? "note" : "notes"}`) : null,
        each.num_files ? h("a", { href: link("trajectories", { run: each.name }) }, "Trajectories") : null,
      );
    }));
    if (focused !== undefined) [...this.runs.querySelectorAll("input")].find((box) => box.dataset.run === focused)?.focus();
  }

  draw() {
    const places = new Map(store.runs.map((each, i) => [each.name, i]));
    const shown = this.chosen().filter((name) => store.metrics.has(name))
      .map((name) => ({ name, place: places.get(name), about: run(name), ...store.metrics.get(name) }));
    this.drawHealth(shown);
    const others = [...new Set(shown.flatMap(({ series }) => [...series.keys()]))].filter((key) => !key.startsWith("eval_") && !key.startsWith("health/") && !isDrawn(key)).sort();
    const groups = [...GROUPS, { title: "Everything else", isFolded: true, charts: others.map((key) => ({ title: key, keys: [key], about: "" })) }];
    const wanted = new Set();
    for (const group of groups) {
      for (const chart of group.charts) {
        if (!shown.some(({ series }) => keysOf(chart, series).length)) continue;
        wanted.add(chart.title);
        if (!this.charts.has(chart.title)) this.put(group, chart);
      }
    }
    for (const [title, { drawn }] of this.charts) {
      if (wanted.has(title)) continue;
      drawn.destroy();
      drawn.element.remove();
      this.charts.delete(title);
    }
    for (const section of this.body.querySelectorAll("[data-group]")) section.hidden = !section.querySelector(".chart");
    for (const { drawn, section } of this.charts.values()) if (section.open !== false) drawn.update(shown, this);
    this.drawEmpty(shown);
  }

  // A chart goes to its group, in the order in which they are listed.
  put(group, chart) {
    let section = [...this.body.children].find((each) => each.dataset.group === group.title);
    if (!section) {
      const grid = h("div", { class: "grid" });
      section = group.isFolded
        ? h("details", { "data-group": group.title, ontoggle: () => this.draw() }, h("summary", {}, h("h2", {}, group.title)), grid)
        : h("section", { "data-group": group.title, "aria-label": group.title }, h("h2", {}, group.title), grid);
      const order = [...GROUPS.map((each) => each.title), "Everything else"];
      const next = [...this.body.children].find((each) => order.indexOf(each.dataset.group) > order.indexOf(group.title));
      this.body.insertBefore(section, next ?? null);
    }
    const drawn = chart.kind === "histogram" ? new Histogram(chart) : new LineChart(chart);
    const titles = group.charts.map((each) => each.title);
    const grid = section.querySelector(".grid");
    const next = [...grid.children].find((each) => titles.indexOf(each.dataset.chart) > titles.indexOf(chart.title));
    grid.insertBefore(drawn.element, next ?? null);
    this.charts.set(chart.title, { drawn, section });
  }

  drawHealth(shown) {
    const notes = shown.flatMap(({ name, place, about }) => (about?.health ?? []).map((note) => ({ ...note, run: name, place })));
    notes.sort((a, b) => b.step - a.step);
    const ahead = shown.filter((each) => each.ahead).map(({ name, ahead }) => h("p", { class: "ahead" },
      `${shown.length > 1 ? `${name}: ` : ""}the batch after step ${ahead.step} is rolled out and being trained on; its reward is ${number(ahead.metrics.reward)}.`));
    this.health.hidden = !notes.length && !ahead.length;
    replace(this.health, h("h2", {}, "Health"), ahead, notes.length ? h("ol", {}, notes.map((note) => h(
      "li", { class: note.is_fatal ? "fatal" : "" },
      h("span", { class: "step" }, `step ${note.step}`),
      h("span", {}, shown.length > 1 ? [h("i", { class: "swatch", style: { color: colour(note.place) }, "aria-hidden": "true" }), h("b", {}, `${note.run}: `)] : null, note.is_fatal ? h("b", {}, "The run was stopped. ") : null, note.sentence),
    ))) : null);
  }

  drawEmpty(shown) {
    const hasCurves = this.charts.size > 0;
    this.empty.hidden = hasCurves;
    if (hasCurves) return;
    const words = !store.runs.length
      ? [`There is no run in “${store.folder}” yet.`, "One that is started shows here by itself."]
      : !this.chosen().length ? ["No run is chosen.", "Choose one or more to see their curves."]
        : shown.some(({ about }) => about?.state === "running") ? ["Nothing has been logged yet.", "Curves appear with the first step."]
          : ["This run has logged no metrics to its folder.", "Leave report_to at its default, or add MetricsFile to the callbacks."];
    replace(this.empty, h("h2", {}, words[0]), h("p", {}, words[1]));
  }

  destroy() {
    removeEventListener("themechange", this.onTheme);
    for (const { drawn } of this.charts.values()) drawn.destroy();
  }
}

export function state(each) {
  if (each.health.some((note) => note.is_fatal) && each.state === "ended") return h("span", { class: "state stopped" }, "stopped");
  if (each.state === "ended") return h("span", { class: "state ended" }, "ended");
  if (each.quiet_seconds !== null && each.quiet_seconds > QUIET) return h("span", { class: "state" }, `quiet for ${duration(each.quiet_seconds)}`);
  return h("span", { class: "state running" }, "running");
}
