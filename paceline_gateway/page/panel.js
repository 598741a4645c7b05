// One generation on the page: its text, its figures, its rounds.
import { element, lazyTable, milliseconds } from "./dom.js";
import { generate } from "./generation.js";
import { partingTable } from "./partings.js";
import { RoundsView, speedOf } from "./rounds.js";
import { TextView } from "./text.js";

const REDRAW_MS = 100;

export class Panel {
  constructor(place, title) {
    const copy = document.getElementById("panel").content.cloneNode(true);
    this._root = copy.querySelector(".panel");
    this._root.setAttribute("aria-label", title);
    this._root.querySelector(".title").textContent = title;
    this._figures = this._root.querySelector(".figures");
    place.append(copy);
    this.text = new TextView(this._root);
    this.rounds = new RoundsView(this._root);
    this._fillPartings = lazyTable(this._root.querySelector(".partings-table"), () => partingTable(this.text.tokens));
    this._facts = { state: "waiting" };
    this._ended = [];
    this._timer = null;
    this._draw();
  }

  /** Runs one request to its end. Throws what stopped it, with the text so far left standing. */
  async run(settings, signal, onTokens) {
    const asked = performance.now();
    let first = 0;
    let firstTokens = 0;
    this._facts = { state: "generating", seed: settings.seed };
    try {
      for await (const { tokens, rounds, end } of generate(settings, signal)) {
        if (tokens) {
          const now = performance.now();
          this.text.add(tokens);
          this._ended.push(...rounds);
          if (!first) [first, firstTokens] = [now, this.text.tokens.length];
          this._facts.firstMs = first - asked;
          this._facts.speed = now > first ? (this.text.tokens.length - firstTokens) / ((now - first) / 1000) : null;
          onTokens(this.text.tokens.length);
        } else {
          this._finish(end);
        }
        this._timer ??= setTimeout(() => this._draw(), REDRAW_MS);
      }
    } catch (error) {
      this._facts.state = error.name === "AbortError" ? "stopped" : "failed";
      throw error;
    } finally {
      this._draw();
      this.text.fillTable();
      this._fillPartings();
      this.rounds.fillTable();
    }
  }

  /** Tokens per second behind the first ones, null before there are others. */
  get speed() {
    return this._facts.speed ?? null;
  }

  remove() {
    this.rounds.end();
    this._root.remove();
  }

  _finish(end) {
    this._facts.state = end.finish === "length" ? "ended: most tokens" : "ended";
    this._facts.seed = end.seed ?? this._facts.seed;
    this._facts.speculation = end.speculation?.num_spec_steps ? end.speculation : null;
    // Arrivals tell little of a short text: what came meanwhile arrives with its first piece.
    this._facts.speed = speedOf(end.rounds ?? [], this.text.tokens.length) ?? this._facts.speed;
    this._addRounds();
    this.rounds.finish(end.rounds ?? []);
  }

  _addRounds() {
    this.rounds.add(this._ended);
    this._ended = [];
  }

  _draw() {
    clearTimeout(this._timer);
    this._timer = null;
    this._addRounds();
    const { state, seed, firstMs, speed, speculation } = this._facts;
    const shown = [
      ["state", state],
      ["tokens", this.text.tokens.length],
      ["tokens per second", speed ? speed.toFixed(1) : "–"],
      ["first token", firstMs == null ? "–" : milliseconds(firstMs)],
      ["acceptance", speculation ? `${(100 * speculation.draft_acceptance_rate).toFixed(0)} %` : "–"],
      ["mean accepted length", speculation ? speculation.mean_acceptance_length.toFixed(2) : "–"],
      ["seed", seed ?? "–"],
    ];
    this._figures.replaceChildren(
      ...shown.map(([name, value]) => element("div", "", element("dt", "", name), element("dd", "", value))),
    );
  }
}
