// The second view: all trajectories of a run, filtered and paged by the server.
import { ask, duration, h, link, number, replace, route } from "./dom.js";
import { run, store } from "./store.js";

const PAGE = 50;
const SORTS = { newest: "newest first", oldest: "oldest first", "-reward": "highest reward first", reward: "lowest reward first", "-seconds": "slowest first", seconds: "fastest first" };
const FIELDS = ["min_step", "max_step", "min_reward", "max_reward", "family", "tool", "stop_reason", "task", "errors", "sort"];

export class List {
  constructor() {
    this.form = h("form", { class: "card filters", "aria-label": "Filters", onsubmit: (event) => event.preventDefault() });
    this.said = h("p", { class: "said", role: "status" });
    this.heads = h("p", { class: "row heads", "aria-hidden": "true" }, ["step", "task", "reward", "calls", "ended", "time"].map((words) => h("span", { class: words }, words)));
    this.rows = h("ol", { class: "rows" });
    this.pages = h("nav", { class: "pages", "aria-label": "Pages of trajectories" });
    this.element = h("div", { class: "list" }, this.form, h("div", { class: "content" }, this.said, this.heads, this.rows, this.pages));
  }

  title() {
    return `Trajectories of ${this.run() ?? "no run"}`;
  }

  run() {
    const named = route().query.get("run");
    if (named && run(named)) return named;
    return [...store.runs].filter((each) => each.num_files).sort((a, b) => a.quiet_seconds - b.quiet_seconds)[0]?.name;
  }

  asked() {
    const { query } = route();
    const asked = { run: this.run(), offset: query.get("offset") || 0 };
    for (const name of FIELDS) if (query.get(name)) asked[name] = query.get(name);
    return asked;
  }

  async refresh() {
    const name = this.run();
    if (!name) {
      replace(this.rows);
      this.heads.hidden = true;
      replace(this.form);
      this.form.hidden = true;
      this.said.textContent = "No run has recorded trajectories yet.";
      return;
    }
    this.form.hidden = false;
    const asked = this.asked(), signature = JSON.stringify([asked, run(name).num_files]);
    if (signature === this.signature && this.isComplete) return;
    let found;
    try {
      found = await ask("trajectories", { ...asked, limit: PAGE });
    } catch (error) {
      this.said.textContent = error.message;
      return;
    }
    if (JSON.stringify(this.asked()) !== JSON.stringify(asked)) return; // the answer to an earlier question
    this.signature = signature;
    this.isComplete = found.is_complete;
    this.drawForm(asked, found.facets);
    this.draw(asked, found);
  }

  go(changes) {
    const next = { ...this.asked(), offset: "", ...changes };
    location.replace(link("trajectories", next));
  }

  drawForm(asked, facets) {
    const signature = JSON.stringify([asked.run, facets, store.runs.map((each) => each.name)]);
    if (signature !== this.formSignature) {
      const focused = document.activeElement?.name;
      this.formSignature = signature;
      let waiting;
      const change = (event) => this.go({ [event.target.name]: event.target.type === "checkbox" ? (event.target.checked ? "1" : "") : event.target.value.trim() });
      const typed = (event) => { clearTimeout(waiting); waiting = setTimeout(() => change(event), 250); };
      const choice = (words, name, options) => h("label", {}, words, h("select", { name, onchange: change }, options.map(([value, text]) => h("option", { value }, text))));
      const counted = (options) => [["", "any"], ...options.map(([value, count]) => [value, `${value || "(unreadable)"} (${count})`])];
      const range = (words, name, [low, high] = ["", ""], step = "any") => h(
        "fieldset", {}, h("legend", {}, words),
        h("input", { name: `min_${name}`, type: "number", step, placeholder: number(low, 2), "aria-label": `${words} from`, oninput: typed }),
        h("span", { "aria-hidden": "true" }, "–"),
        h("input", { name: `max_${name}`, type: "number", step, placeholder: number(high, 2), "aria-label": `${words} to`, oninput: typed }),
      );
      replace(
        this.form,
        choice("Run", "run", store.runs.filter((each) => each.num_files).map((each) => [each.name, each.name])),
        range("Step", "step", facets.steps ?? undefined, "1"),
        range("Reward", "reward", facets.rewards ?? undefined),
        facets.families.length ? choice("Family", "family", counted(facets.families)) : null,
        facets.tools.length ? choice("Tool", "tool", counted(facets.tools)) : null,
        choice("Stop reason", "stop_reason", counted(facets.stop_reasons)),
        h("label", {}, "Task", h("input", { name: "task", type: "search", placeholder: "part of its id", oninput: typed })),
        choice("Order", "sort", Object.entries(SORTS)),
        h("label", { class: "check" }, h("input", { name: "errors", type: "checkbox", onchange: change }), "with a failed call"),
        h("button", { type: "button", onclick: () => location.replace(link("trajectories", { run: asked.run })) }, "Clear"),
      );
      if (focused) this.form.elements[focused]?.focus();
    }
    for (const field of this.form.elements) {
      if (!field.name || field === document.activeElement) continue;
      const value = asked[field.name] ?? (field.name === "sort" ? "newest" : "");
      if (field.type === "checkbox") field.checked = value === "1";
      else field.value = value;
    }
  }

  draw(asked, { total, of, rows, is_complete: isComplete }) {
    const offset = Number(asked.offset), last = offset + rows.length;
    this.said.textContent = `${total.toLocaleString("en")} of ${of.toLocaleString("en")} trajectories${isComplete ? "" : ", and more are being read"}`;
    this.heads.hidden = !rows.length;
    replace(this.rows, rows.map((row) => h("li", {}, h(
      "a", { class: "row", href: link("trajectory", { run: asked.run, step: row.step, rank: row.rank || "", row: row.row }) },
      h("span", { class: "step" }, h("small", {}, "step "), row.step),
      h("span", { class: "task" }, row.task_id, row.family || row.difficulty ? h("small", {}, ` ${[row.family, row.difficulty].filter(Boolean).join(" · ")}`) : null),
      reward(row.reward),
      h("span", { class: "path" }, row.calls.length ? row.calls.map((call, i) => [i ? h("span", { class: "arrow", "aria-hidden": "true" }, row.calls[i - 1].turn === call.turn ? " + " : " → ") : null, h("span", { class: call.kind === "ok" ? "" : "bad", title: call.kind }, call.name || "unreadable call")]) : h("span", { class: "none" }, "no call")),
      h("span", { class: `stop stop-${row.stop_reason === "answered" ? "good" : "cut"}` }, row.stop_reason.replaceAll("_", " ")),
      h("span", { class: "seconds" }, duration(row.seconds)),
    ))));
    const page = (words, to, isPossible) => h("button", { type: "button", disabled: !isPossible, onclick: () => { this.go({ offset: to || "" }); scrollTo(0, 0); } }, words);
    replace(this.pages, total > PAGE ? [page("← Previous", Math.max(0, offset - PAGE), offset > 0), h("span", {}, rows.length ? `${(offset + 1).toLocaleString("en")}–${last.toLocaleString("en")}` : "none"), page("Next →", offset + PAGE, last < total)] : null);
  }

  destroy() {}
}

export function reward(value) {
  const kind = value === null || value === undefined ? "none" : value > 0 ? "good" : value < 0 ? "bad" : "zero";
  return h("span", { class: `reward ${kind}`, "aria-label": `reward ${number(value)}` }, number(value, 2));
}
