// The third view: one trajectory in its group, on a timeline, token by token, and what became of its task from step to step.
import { ask, duration, h, link, number, replace, route } from "./dom.js";
import { reward } from "./list.js";
import { Tokens } from "./tokens.js";

const LONG = 280; // characters of a text, beyond which it is folded

// How an attempt ended, or that it is a replayed solution.
const ending = (each) => (each.is_scripted ? "scripted solution" : each.stop_reason.replaceAll("_", " "));

export class Viewer {
  constructor() {
    this.head = h("header", { class: "card about" });
    this.group = h("section", { class: "group", "aria-label": "Attempts at this task" });
    this.tokens = h("div", {});
    this.history = h("section", { class: "card history", "aria-label": "From step to step" });
    this.element = h("div", { class: "viewer" }, this.head, this.group, this.tokens, this.history);
    this.onKey = (event) => this.key(event);
    addEventListener("keydown", this.onKey);
  }

  title() {
    return `${this.one?.task_id ?? "Trajectory"}, step ${route().query.get("step")}`;
  }

  where() {
    const { query } = route();
    return { run: query.get("run"), step: Number(query.get("step") || 0), rank: Number(query.get("rank") || 0), row: Number(query.get("row") || 0) };
  }

  async refresh() {
    const where = this.where(), signature = JSON.stringify(where);
    if (signature === this.signature) return;
    this.signature = signature;
    let one;
    try {
      one = await ask("trajectory", where);
    } catch (error) {
      this.one = null;
      replace(this.head, h("h2", {}, "This trajectory cannot be shown"), h("p", {}, error.message));
      replace(this.group); replace(this.tokens); replace(this.history);
      return;
    }
    if (signature !== JSON.stringify(this.where())) return;
    const isSameTask = this.one?.task_id === one.task_id && this.shownRun === where.run;
    const isSameGroup = isSameTask && this.one.step === one.step;
    this.one = one;
    this.shownRun = where.run;
    this.drawHead(where, one);
    replace(this.tokens, new Tokens(one.tokens, one).element);
    if (isSameGroup) this.drawGroup(where);
    else {
      this.attempts = await ask("group", { run: where.run, step: where.step, task: one.task_id });
      this.drawGroup(where);
    }
    if (!isSameTask) {
      this.steps = await ask("history", { run: where.run, task: one.task_id });
    }
    this.drawHistory(where);
  }

  drawHead(where, one) {
    const parts = Object.entries(one.rewards).map(([name, value]) => h("span", { class: "part" }, `${name} `, h("b", {}, number(value))));
    replace(
      this.head,
      h("p", { class: "crumbs" }, h("a", { href: link("trajectories", { run: where.run }) }, "Trajectories"), " / ", where.run),
      h("h2", {}, one.task_id, one.difficulty || one.family ? h("small", {}, [one.family, one.difficulty].filter(Boolean).join(" · ")) : null),
      h("div", { class: "prompt" }, asMessages(one.prompt).map((message) => h("p", {}, h("b", { class: "who" }, message.role), folded(textOf(message.content))))),
      h("p", { class: "facts" },
        h("span", {}, `step ${one.step}, attempt ${one.row + 1}`), reward(one.reward), parts,
        h("span", {}, ending(one)), h("span", {}, duration(one.seconds)),
        one.is_learnt_from ? null : h("span", { class: "bad" }, "not learnt from")),
      one.error ? h("p", { class: "bad" }, folded(one.error)) : null,
      one.states && Object.keys(one.states).length ? h("details", {}, h("summary", {}, "What it left behind at the servers"), h("pre", {}, JSON.stringify(one.states, null, 2))) : null,
    );
  }

  drawGroup(where) {
    const longest = Math.max(...this.attempts.map((each) => total(each)), 1e-6);
    const given = this.attempts.map((each) => each.reward).filter((value) => value !== null);
    const mean = given.length ? given.reduce((a, b) => a + b, 0) / given.length : null;
    replace(
      this.group,
      h("div", { class: "head" }, h("h2", {}, `The group: ${this.attempts.length} ${this.attempts.length === 1 ? "attempt" : "attempts"} at step ${where.step}`),
        h("p", {}, "mean reward ", h("b", {}, number(mean)), h("span", { class: "hint" }, " · keys [ and ] go through them"))),
      h("p", { class: "timekey", "aria-hidden": "true" }, h("i", { class: "generation" }), "generation", h("i", { class: "calling" }), "tools", h("i", { class: "failed" }), "failed call"),
      h("ol", { class: "attempts", tabindex: "0", "aria-label": "Attempts, side by side" }, this.attempts.map((each) => this.attempt(where, each, longest))),
    );
    // Not by `scrollIntoView`, which would also scroll the page.
    const all = this.group.querySelector(".attempts"), chosen = all.querySelector(".chosen");
    if (chosen && chosen.offsetLeft + chosen.offsetWidth > all.offsetLeft + all.clientWidth) all.scrollLeft = chosen.offsetLeft - all.offsetLeft - 40;
  }

  attempt(where, each, longest) {
    const isChosen = each.rank === where.rank && each.row === where.row;
    const turns = [];
    let turn = -1;
    for (const message of asMessages(each.messages)) {
      if (message.role !== "assistant") continue;
      turn += 1;
      const number = turn, calls = (each.calls ?? []).filter((call) => call.turn === number);
      turns.push(h(
        "li", {}, h("span", { class: "turn" }, `turn ${turn + 1}`, h("small", {}, seconds(each, turn))),
        textOf(message.content).trim() ? h("p", { class: "says" }, folded(textOf(message.content))) : null,
        calls.map((call) => h(
          "div", { class: call.kind === "ok" ? "call" : "call failed" },
          h("p", { class: "made" }, h("b", {}, call.name || "unreadable call"), h("code", {}, folded(call.arguments))),
          h("p", { class: "came" }, h("span", { class: "kind" }, call.kind.replaceAll("_", " ")), ` ${duration(call.seconds)}`, call.attempts > 1 ? `, sent ${call.attempts} times` : ""),
          h("p", { class: "result" }, folded(call.text)),
        )),
      ));
    }
    return h(
      "li", { class: isChosen ? "card attempt chosen" : "card attempt" },
      h("a", { href: link("trajectory", { run: where.run, step: each.step, rank: each.rank || "", row: each.row }), "aria-current": isChosen ? "true" : null },
        h("span", {}, `Attempt ${each.row + 1}`), reward(each.reward), h("small", {}, `${ending(each)}, ${duration(each.seconds)}`)),
      timeline(each, longest), h("ol", { class: "turns" }, turns),
    );
  }

  drawHistory(where) {
    const { steps, num_steps: count } = this.steps;
    const path = (step) => step.paths[0]?.[0] ?? "";
    replace(
      this.history, h("h2", {}, "From step to step"),
      count < 2 ? h("p", {}, "This task was attempted at one step so far.") : [
        h("p", {}, `Attempted at ${count} steps${count > steps.length ? `, of which the last ${steps.length} are shown` : ""}. Each mark is an attempt, by its reward.`),
        h("ol", { class: "steps" }, steps.map((step, i) => {
          const before = i ? steps[i - 1].mean_reward : null;
          const change = before === null || step.mean_reward === null ? null : step.mean_reward - before;
          const isNew = i > 0 && path(step) !== path(steps[i - 1]);
          return h(
            "li", { class: step.step === where.step ? "chosen" : "" },
            h("span", { class: "step" }, `step ${step.step}`),
            h("span", { class: "mean" }, h("b", {}, number(step.mean_reward, 2)), change ? h("small", { class: change > 0 ? "up" : "down" }, ` ${change > 0 ? "▲" : "▼"} ${number(Math.abs(change), 2)}`) : null),
            h("span", { class: "dots" }, step.attempts.map((each) => h("a", {
              class: `dot ${each.reward > 0 ? "good" : each.reward < 0 ? "bad" : "zero"}`, title: `attempt ${each.row + 1}: reward ${number(each.reward)}`,
              "aria-label": `step ${step.step}, attempt ${each.row + 1}, reward ${number(each.reward)}`,
              href: link("trajectory", { run: where.run, step: step.step, rank: each.rank || "", row: each.row }),
            }))),
            h("span", { class: "path" }, step.paths.map(([words, times], j) => h("span", { class: j === 0 && isNew ? "new" : "" }, `${words || "no call"} ×${times}`))),
            h("span", { class: "answers" }, step.answers.map(([words, times]) => h("q", {}, `${words.length > 60 ? `${words.slice(0, 60)}…` : words} ×${times}`))),
          );
        })),
      ],
    );
  }

  key(event) {
    if (!["[", "]"].includes(event.key) || event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const where = this.where();
    const place = (this.attempts ?? []).findIndex((each) => each.rank === where.rank && each.row === where.row);
    const next = this.attempts?.[place + (event.key === "]" ? 1 : -1)];
    if (place >= 0 && next) location.replace(link("trajectory", { run: where.run, step: next.step, rank: next.rank || "", row: next.row }));
  }

  destroy() {
    removeEventListener("keydown", this.onKey);
  }
}

function asMessages(messages) {
  return Array.isArray(messages) ? messages.filter((message) => message && typeof message === "object") : [];
}

function textOf(content) {
  if (content === null || content === undefined) return "";
  return typeof content === "string" ? content : JSON.stringify(content);
}

function folded(text) {
  const words = textOf(text);
  if (words.length <= LONG) return words;
  return h("details", { class: "long" }, h("summary", {}, `${words.slice(0, LONG)}… `, h("u", {}, `${(words.length - LONG).toLocaleString("en")} more characters`)), h("span", {}, words));
}

function total(each) {
  return (each.generation_seconds ?? []).reduce((a, b) => a + b, 0) + (each.tool_seconds ?? []).reduce((a, b) => a + b, 0) || each.seconds || 0;
}

function seconds(each, turn) {
  const generation = each.generation_seconds?.[turn];
  return generation === undefined ? "" : ` ${duration(generation)}`;
}

// Generation and tools of each turn, as long as they took, beside attempts on the same scale.
function timeline(each, longest) {
  const parts = [];
  (each.generation_seconds ?? []).forEach((generation, turn) => {
    const calls = (each.calls ?? []).filter((call) => call.turn === turn);
    parts.push(["generation", generation, `turn ${turn + 1}: ${duration(generation)} of generation`]);
    const tools = each.tool_seconds?.[turn] ?? 0;
    if (calls.length) {
      const kind = calls.some((call) => call.kind !== "ok") ? "calling failed" : "calling";
      parts.push([kind, tools, `turn ${turn + 1}: ${duration(tools)} of ${calls.map((call) => `${call.name || "unreadable call"} (${call.kind}, ${duration(call.seconds)})`).join(", ")}`]);
    }
  });
  if (!parts.length) return null;
  return h("ol", { class: "timeline", "aria-label": `Timeline of ${duration(total(each))}` }, parts.map(([kind, length, words]) => h("li", { class: kind, title: words, style: { width: `${(100 * length) / longest}%` } }, h("span", { class: "sr" }, words))));
}
