// Charts over the steps, drawn by uPlot, and the histogram of ratios.
import { css, h, number, replace } from "./dom.js";
import { label, matches } from "./charts.js";

const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3], [4, 4], [1, 2]];
export const NUM_COLOURS = 8;
const HEIGHT = 190;

export function colour(index) {
  return css(`--c${(index % NUM_COLOURS) + 1}`);
}

// The metrics of a chart that a run has.
export function keysOf(chart, series) {
  const found = [];
  for (const pattern of chart.keys) {
    for (const key of series.keys()) if (!found.includes(key) && matches(pattern, key)) found.push(key);
  }
  return found;
}

function smooth(values, strength) {
  let total = 0, weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    total = strength * total + (1 - strength) * value;
    weight = strength * weight + (1 - strength);
    return total / weight;
  });
}

// Lines to draw of a chart: one for each metric of each run, with its points by step.
function linesOf(chart, shown) {
  const keys = [];
  for (const { series } of shown) for (const key of keysOf(chart, series)) if (!keys.includes(key)) keys.push(key);
  const lines = [];
  for (const { name, place, series } of shown) {
    keys.forEach((key, number) => {
      for (const isEvaluation of [false, true]) {
        const found = series.get(isEvaluation ? `eval_${key}` : key);
        if (!found) continue;
        const words = shown.length > 1 && keys.length > 1 ? `${name} · ${label(key, chart.keys)}` : shown.length > 1 ? name : label(key, chart.keys);
        lines.push({
          of: words,
          words: isEvaluation ? `${words} (evaluation)` : words,
          isEvaluation,
          stroke: () => colour(shown.length > 1 ? place : number),
          style: shown.length > 1 ? Math.min(number, 3) : 0,
          dash: shown.length > 1 ? DASHES[number % DASHES.length] : [],
          points: new Map(found.steps.map((step, i) => [step, found.values[i]])),
        });
      }
    });
  }
  return lines;
}

function boundsOf(chart, shown) {
  const found = [];
  for (const { about } of shown) {
    const { clip_limits: clips = [], settings = {} } = about ?? {};
    if (chart.bounds === "ratio") for (const value of clips) found.push({ value, words: "clip" });
    if (chart.bounds === "kl" && settings.beta > 0) {
      if (settings.kl_target) found.push({ value: settings.kl_target, words: "target" });
      if (settings.kl_hard_cap) found.push({ value: settings.kl_hard_cap, words: "cap" });
    }
  }
  return found.filter((each, i) => found.findIndex((other) => other.value === each.value && other.words === each.words) === i);
}

function tick(value, increment) {
  const most = Math.abs(value);
  if (most >= 1e5 || (most > 0 && increment < 1e-5)) return value.toExponential(1);
  let digits = 0;
  while (digits < 7 && Math.abs(increment * 10 ** digits - Math.round(increment * 10 ** digits)) > 1e-6) digits++;
  return value.toFixed(digits);
}

export class LineChart {
  constructor(chart) {
    this.chart = chart;
    this.plot = null;
    this.signature = "";
    this.legend = h("ul", { class: "legend" });
    this.place = h("div", { class: "plot", tabindex: "0", role: "img", onkeydown: (event) => this.key(event) });
    this.element = h(
      "figure", { class: "card chart", "data-chart": chart.title },
      h("figcaption", {}, h("h3", {}, chart.title), chart.about ? h("p", {}, chart.about) : null),
      this.place, this.legend,
    );
    this.observer = new ResizeObserver(() => this.plot?.setSize({ width: this.width(), height: HEIGHT }));
    this.observer.observe(this.place);
  }

  width() {
    return Math.max(200, Math.floor(this.place.clientWidth));
  }

  update(shown, { smoothing }) {
    const lines = linesOf(this.chart, shown);
    const steps = [...new Set(lines.flatMap((line) => [...line.points.keys()]))].sort((a, b) => a - b);
    const data = [steps], series = [{}];
    this.rows = [];
    for (const line of lines) {
      const values = steps.map((step) => (line.points.has(step) ? line.points.get(step) : undefined));
      const isSmoothed = smoothing > 0 && !line.isEvaluation;
      if (isSmoothed) {
        data.push(values);
        series.push({ stroke: line.stroke, width: 1, alpha: 0.25, dash: line.dash, spanGaps: true, points: { show: false } });
      }
      this.rows.push({ line, index: data.length });
      data.push(isSmoothed ? smooth(values, smoothing) : values);
      series.push({
        stroke: line.stroke, width: 1.75, dash: line.dash, spanGaps: true,
        paths: line.isEvaluation ? () => null : undefined,
        points: line.isEvaluation ? { show: true, size: 8, width: 2, fill: () => css("--card") } : { show: steps.length < 25, size: 4.5, fill: line.stroke, width: 0 },
      });
    }
    this.bounds = boundsOf(this.chart, shown);
    this.marks = shown.flatMap(({ about }) => (about?.health ?? []).map((note) => note.step));
    const signature = JSON.stringify([lines.map((line) => [line.words, line.dash]), smoothing > 0, document.documentElement.dataset.theme, css("--ink"), steps.length < 25]);
    if (this.plot && signature === this.signature) {
      this.plot.setData(data);
    } else {
      this.signature = signature;
      this.plot?.destroy();
      this.plot = new uPlot(this.options(series), data, this.place);
    }
    this.said(data);
    this.showValues(null);
  }

  options(series) {
    const axis = { stroke: () => css("--faint"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false }, font: `11px ${css("--sans")}` };
    return {
      width: this.width(), height: HEIGHT, series, legend: { show: false }, padding: [10, 12, 0, 0],
      cursor: { sync: { key: "step" }, points: { size: 7 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range: (_, low, high) => this.range(low, high) } },
      axes: [
        { ...axis, size: 26, gap: 4, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 100000], values: (_, ticks) => ticks.map(String) },
        { ...axis, size: 52, gap: 6, space: 34, values: (_, ticks, axis, space, increment) => ticks.map((value) => tick(value, increment)) },
      ],
      hooks: { draw: [(plot) => this.drawBounds(plot)], setCursor: [(plot) => this.showValues(plot.cursor.idx)] },
    };
  }

  range(low, high) {
    if (low === null || low === undefined) return [0, 1];
    const wanted = this.chart.range;
    if (wanted) return [Math.min(wanted[0], low), Math.max(wanted[1], high) * 1.02];
    // A bound is shown where it is not so far off that the curve would be a flat line.
    for (const { value } of this.bounds) {
      const size = Math.max(high - low, 0.25 * Math.abs(value));
      if (value > low - 2 * size && value < high + 2 * size) {
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    if (low === high) return [low - (0.1 * Math.abs(low) || 1), high + (0.1 * Math.abs(high) || 1)];
    const room = 0.08 * (high - low);
    return [low >= 0 && low < room * 4 ? 0 : low - room, high + room];
  }

  drawBounds(plot) {
    const { ctx, bbox } = plot, ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.lineWidth = ratio;
    ctx.font = `${10 * ratio}px ${css("--sans")}`;
    for (const { value, words } of this.bounds) {
      const y = plot.valToPos(value, "y", true);
      ctx.strokeStyle = ctx.fillStyle = css("--bound");
      ctx.setLineDash([5 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.textAlign = "right";
      ctx.fillText(`${words} ${number(value)}`, bbox.left + bbox.width - 4 * ratio, y - 4 * ratio);
    }
    ctx.setLineDash([]);
    ctx.fillStyle = css("--warn");
    for (const step of this.marks) {
      const x = plot.valToPos(step, "x", true), y = bbox.top + bbox.height;
      ctx.beginPath();
      ctx.moveTo(x - 4 * ratio, y);
      ctx.lineTo(x + 4 * ratio, y);
      ctx.lineTo(x, y - 7 * ratio);
      ctx.fill();
    }
    ctx.restore();
  }

  showValues(index) {
    const steps = this.plot?.data[0] ?? [];
    const at = index ?? steps.length - 1;
    // An evaluation is told beside what it is the evaluation of.
    const entries = new Map();
    for (const { line, index: row } of this.rows) {
      let place = at;
      const values = this.plot.data[row];
      if (index === null || index === undefined) while (place >= 0 && (values[place] === null || values[place] === undefined)) place--;
      const sign = h("i", { class: line.isEvaluation ? "ring" : `swatch dashed-${line.style}`, style: { color: line.stroke() }, title: line.isEvaluation ? "evaluation" : null });
      const value = h("b", {}, number(values[place]));
      if (line.isEvaluation && entries.has(line.of)) entries.get(line.of).append(sign, h("span", { class: "sr" }, "evaluation"), value);
      else entries.set(line.of, h("li", {}, sign, h("span", {}, line.isEvaluation ? `${line.of} (evaluation)` : line.of), value));
    }
    const bounds = this.bounds.map(({ value, words }) => h("li", {}, h("i", { class: "dash", "aria-hidden": "true" }), h("span", {}, words), h("b", {}, number(value))));
    replace(this.legend, [...entries.values()], bounds, index === null || index === undefined ? null : h("li", { class: "at" }, `step ${steps[at]}`));
  }

  said(data) {
    const steps = data[0];
    const words = this.rows.map(({ line, index }) => `${line.words} ${number(data[index].findLast((value) => value !== null && value !== undefined))}`);
    this.place.setAttribute("aria-label", `${this.chart.title}, up to step ${steps.at(-1) ?? 0}: ${words.join(", ")}. Arrow keys go through the steps.`);
  }

  key(event) {
    const steps = this.plot?.data[0] ?? [];
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || !steps.length) return;
    event.preventDefault();
    const now = this.plot.cursor.idx ?? steps.length - 1;
    const place = Math.min(steps.length - 1, Math.max(0, now + moves[event.key]));
    this.plot.setCursor({ left: this.plot.valToPos(steps[place], "x"), top: 20 });
    this.showValues(place);
  }

  destroy() {
    this.observer.disconnect();
    this.plot?.destroy();
  }
}

const BIN = /^ratio\/histogram\/(?:below_([\d.e+-]+)|above_([\d.e+-]+)|([\d.e+-]+)_to_([\d.e+-]+))$/;

function binsOf(series) {
  const bins = [];
  for (const [key, { steps, values }] of series) {
    const found = BIN.exec(key);
    if (!found) continue;
    const [, below, above, low, high] = found;
    bins.push({
      low: below ? -Infinity : Number(above ?? low), high: above ? Infinity : Number(below ?? high),
      points: new Map(steps.map((step, i) => [step, values[i]])),
    });
  }
  return bins.sort((a, b) => a.low - b.low);
}

export class Histogram {
  constructor(chart) {
    this.chart = chart;
    this.chosen = null; // a step; the last one if none was chosen
    this.body = h("div", { class: "histograms" });
    this.slider = h("input", {
      type: "range", min: "0", step: "1", "aria-label": "Step of the histogram",
      oninput: () => {
        const place = Number(this.slider.value);
        this.chosen = place === this.steps.length - 1 ? null : this.steps[place];
        this.draw();
      },
    });
    this.said = h("span", { class: "at" });
    this.element = h(
      "figure", { class: "card chart", "data-chart": chart.title },
      h("figcaption", {}, h("h3", {}, chart.title), h("p", {}, chart.about)),
      this.body, h("label", { class: "slider" }, this.slider, this.said),
    );
  }

  update(shown) {
    this.shown = shown;
    this.draw();
  }

  draw() {
    const bins = new Map(this.shown.map((each) => [each.name, binsOf(each.series)]));
    this.steps = [...new Set([...bins.values()].flat().flatMap((bin) => [...bin.points.keys()]))].sort((a, b) => a - b);
    const step = this.chosen ?? this.steps.at(-1);
    this.slider.max = String(Math.max(0, this.steps.length - 1));
    this.slider.value = String(Math.max(0, this.steps.indexOf(step)));
    this.said.textContent = `step ${step ?? "–"}`;
    replace(this.body, this.shown.filter(({ name }) => bins.get(name).length).map((each) => this.bars(each, bins.get(each.name), step)));
  }

  bars({ name, place, about }, bins, step) {
    const clips = about?.clip_limits ?? [], gate = about?.settings?.ratio_gate;
    const near = (a, b) => b !== undefined && b !== null && Math.abs(a - b) < 1e-6 * Math.max(1, Math.abs(b));
    const values = bins.map((bin) => bin.points.get(step) ?? 0);
    const most = Math.max(...values, 1e-9);
    const columns = bins.map((bin, i) => {
      const edge = clips.some((limit) => near(bin.low, limit)) ? "clip" : near(bin.low, gate) || near(bin.low, 1 / gate) ? "gate" : null;
      const words = `${bin.low === -Infinity ? "below" : number(bin.low, 2)} ${bin.high === Infinity ? "and above" : bin.low === -Infinity ? number(bin.high, 2) : `to ${number(bin.high, 2)}`}: ${(100 * values[i]).toFixed(1)} %`;
      return h(
        "li", { class: edge ? `bin edge-${edge}` : "bin", title: words },
        h("span", { class: "sr" }, words + (edge ? `; ${edge} bound below` : "")),
        h("i", { "aria-hidden": "true", style: { "--high": `${100 * Math.sqrt(values[i] / most)}%`, "--hue": colour(this.shown.length > 1 ? place : 0) } }),
        h("em", { "aria-hidden": "true" }, bin.low === -Infinity ? "" : number(bin.low, 2).replace(/0+$/, "").replace(/\.$/, "")),
        edge ? h("b", { "aria-hidden": "true" }, edge) : null,
      );
    });
    return h("div", {}, this.shown.length > 1 ? h("p", { class: "of" }, name) : null, h("ol", { class: "bins", "aria-label": `Ratios of ${name} at step ${step}` }, columns));
  }

  destroy() {}
}
