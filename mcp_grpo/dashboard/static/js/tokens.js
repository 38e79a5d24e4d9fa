// Every token of a trajectory, coloured by a quantity, with its numbers under the pointer or the keyboard.
import { h, number, replace } from "./dom.js";

const ROLES = {
  environment: "written by a tool or by the chat template",
  choice: "the policy's choice",
  trigger: "opens a tool call",
  straddling: "syntax and a choice in one",
  forced: "syntax, without a choice",
};
const signed = (value) => (value > 0 ? `+${number(value)}` : number(value));
// How a number becomes a colour: which side of the middle it is on, and how strong. `most` is the largest distance there is.
export const QUANTITIES = {
  role: { words: "author and role" },
  in_loss: { words: "in the loss" },
  sampler_logp: { words: "sampler log-prob", far: (x) => Math.min(0, x), least: 1, ends: ["certain", "unlikely"] },
  trainer_logp: { words: "trainer log-prob", far: (x) => Math.min(0, x), least: 1, ends: ["certain", "unlikely"] },
  ratio: { words: "ratio", far: (x) => Math.log(x), least: 0.02, shown: (far) => number(Math.exp(far)), middle: "1" },
  value: { words: "value", far: (x) => x, least: 0.05, shown: signed, middle: "0" },
  advantage: { words: "advantage", far: (x) => x, least: 0.05, shown: signed, middle: "0" },
};

export class Tokens {
  constructor(tokens, about) {
    this.tokens = tokens;
    this.at = 0;
    this.authors = tokens.turn.map((turn) => (turn < 0 ? "environment" : "policy"));
    const there = Object.keys(QUANTITIES).filter((name) => name === "role" || tokens[name]?.some((value) => value !== null));
    this.quantity = there.includes(sessionStorage.getItem("quantity")) ? sessionStorage.getItem("quantity") : "role";
    const choose = h(
      "select", { id: "quantity", onchange: () => { this.quantity = choose.value; sessionStorage.setItem("quantity", choose.value); this.paint(); } },
      there.map((name) => h("option", { value: name, selected: name === this.quantity }, QUANTITIES[name].words)),
    );
    this.key = h("ul", { class: "key", "aria-label": "Meaning of the colours" });
    this.spans = [];
    this.text = h("div", {
      class: "tokens", tabindex: "0", role: "application", "aria-label": "Tokens. Arrow keys go from token to token, up and down from turn to turn.",
      onkeydown: (event) => this.move(event),
      onpointerover: (event) => { if (event.target.dataset?.token) this.look(Number(event.target.dataset.token)); },
      onclick: (event) => { if (event.target.dataset?.token) this.look(Number(event.target.dataset.token)); },
    });
    this.numbers = h("dl", { class: "numbers", "aria-live": "polite" });
    this.layOut(about);
    this.element = h(
      "section", { class: "card tokenview", "aria-label": "Tokens" },
      h("div", { class: "head" }, h("h2", {}, "Tokens"), h("label", {}, "Colour by ", choose), this.key),
      h("div", { class: "split" }, this.text, this.numbers),
    );
    this.paint();
    this.look(Math.max(0, tokens.turn.findIndex((turn) => turn >= 0)), false);
  }

  layOut({ generation_seconds: generation, tool_seconds: calls }) {
    const { turn: turns, text } = this.tokens;
    let block = null, before = null, turn = -1;
    this.starts = [];
    turns.forEach((now, i) => {
      if (now !== before) {
        turn = Math.max(turn, now);
        const seconds = now >= 0 ? generation?.[now] : calls?.[turn];
        const words = now >= 0 ? `turn ${now + 1}, the policy` : "tools and template";
        const length = turns.slice(i).findIndex((each) => each !== now);
        const count = length < 0 ? turns.length - i : length;
        block = h("p", { class: now >= 0 ? "block policy" : "block environment" });
        this.text.append(h("h3", {}, words, h("small", {}, `${count} tokens${seconds ? `, ${seconds.toFixed(2)} s` : ""}`)), block);
        this.starts.push(i);
        before = now;
      }
      const span = h("span", { "data-token": i });
      span.textContent = (text[i] ?? "") === "" ? "⋯" : text[i].replaceAll("\n", "⏎\n");
      block.append(span);
      this.spans.push(span);
    });
    if (!turns.length) this.text.append(h("p", {}, "No token was recorded."));
  }

  paint() {
    const name = this.quantity, values = this.tokens[name] ?? [], { far, least, shown, middle, ends } = QUANTITIES[name];
    const distances = far ? values.map((value) => (value === null ? null : far(value))) : [];
    let most = least ?? 0;
    distances.forEach((value, i) => { if (this.tokens.turn[i] >= 0 && Number.isFinite(value)) most = Math.max(most, Math.abs(value)); });
    this.spans.forEach((span, i) => {
      let kind = "";
      if (name === "role") kind = this.authors[i] === "environment" ? "environment" : values[i] ?? "choice";
      else if (name === "in_loss") kind = values[i] ? "seen" : this.authors[i] === "environment" ? "environment" : "unseen";
      else if (this.authors[i] === "environment" || distances[i] === null || distances[i] === undefined) kind = "nothing";
      else kind = distances[i] < 0 ? "low" : "high";
      span.className = `token ${kind}${i === this.at ? " at" : ""}`;
      span.style.setProperty("--strength", far && distances[i] ? String(0.06 + 0.74 * Math.sqrt(Math.min(1, Math.abs(distances[i]) / most))) : "0.04");
    });
    const entry = (kind, words, strength) => h("li", {}, h("i", { class: `token ${kind}`, "aria-hidden": "true", style: strength ? { "--strength": strength } : {} }), words);
    if (name === "role") {
      const there = new Set(this.spans.map((span) => span.classList[1]));
      replace(this.key, Object.entries(ROLES).filter(([kind]) => there.has(kind)).map(([kind, words]) => entry(kind, words)));
    } else if (name === "in_loss") {
      replace(this.key, entry("seen", "in the loss"), entry("unseen", "left out"), entry("environment", "not the policy's"));
    } else if (ends) {
      replace(this.key, entry("low", ends[0], "0.06"), entry("low", `${ends[1]} (${number(-most)})`, "0.8"));
    } else {
      replace(this.key, entry("low", shown(-most), "0.8"), entry("high", middle, "0.04"), entry("high", shown(most), "0.8"));
    }
  }

  look(place, isAsked = true) {
    if (!this.spans.length) return;
    this.spans[this.at].classList.remove("at");
    this.at = place;
    const span = this.spans[place], all = this.tokens;
    span.classList.add("at");
    const rows = [
      ["token", JSON.stringify(all.text[place] ?? "")],
      ["id", all.ids[place]],
      ["place", `${place + 1} of ${this.spans.length}`],
      ["author", all.turn[place] < 0 ? "tools and template" : `the policy, turn ${all.turn[place] + 1}`],
      all.role ? ["role", all.role[place]] : null,
      all.in_loss ? ["in the loss", all.in_loss[place] ? "yes" : "no"] : null,
    ];
    if (all.turn[place] >= 0) {
      for (const name of ["sampler_logp", "trainer_logp", "ratio", "value", "advantage"]) {
        const value = all[name]?.[place];
        if (value !== null && value !== undefined) rows.push([QUANTITIES[name].words, number(value, 4)]);
      }
      const logp = all.sampler_logp?.[place];
      if (logp !== null && logp !== undefined) rows.push(["probability", number(Math.exp(logp), 4)]);
    }
    replace(this.numbers, rows.filter(Boolean).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    if (isAsked) span.scrollIntoView({ block: "nearest" });
  }

  move(event) {
    const last = this.spans.length - 1;
    const block = this.starts.findLastIndex((start) => start <= this.at);
    const places = {
      ArrowLeft: this.at - 1, ArrowRight: this.at + 1, Home: 0, End: last,
      ArrowUp: this.starts[Math.max(0, block - (this.at === this.starts[block] ? 1 : 0))], ArrowDown: this.starts[block + 1] ?? last,
    };
    if (!(event.key in places) || last < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.look(Math.min(last, Math.max(0, places[event.key])));
  }
}
