// The rounds of one generation as bars on a time axis, and as a table.
import { counted, lazyTable, milliseconds, table } from "./dom.js";
import { stepper } from "./stepper.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 120;
const AXIS = 18;
const WIDEST = 24000;
const READY = "Point at a round, or step through them with the arrow keys.";

/** The four parts of a round, in the order in which they pass. */
export function partsOf(round) {
  const parts = [
    ["wait", round.draft_wait_ms],
    ["wire", round.wire_ms],
    ["verify", round.target.service_ms],
    ["accept", round.accept_ms],
  ];
  // A self-started round's parts began before the verdict from which its time is counted.
  const sum = parts.reduce((total, [, ms]) => total + ms, 0);
  const scale = sum > round.round_ms ? round.round_ms / sum : 1;
  return parts.map(([name, ms]) => [name, ms * scale]);
}

/** Tokens per second behind the first round; null where the records are not of all of so many tokens. */
export function speedOf(rounds, tokens) {
  const committed = rounds.reduce((sum, round) => sum + round.accepted + 1, 0);
  const ms = rounds.slice(1).reduce((sum, round) => sum + round.round_ms, 0);
  return ms && committed >= tokens ? (1000 * (tokens - rounds[0].accepted - 1)) / ms : null;
}

/** The chart of one panel. */
export class RoundsView {
  constructor(panel) {
    this.rounds = [];
    this._plot = panel.querySelector(".plot");
    this._detail = panel.querySelector(".round-detail");
    this._groups = [];
    this._extent = { ms: 0, tokens: 0 };
    this._zoom = 1;
    stepper(this._plot, { count: () => this._groups.length, at: (i) => this._groups[i] }, (i) => {
      this._detail.textContent = detailOf(this.rounds[i], i);
    });
    for (const [name, factor] of [["in", 2], ["out", 0.5]]) {
      panel.querySelector(`.zoom .${name}`).addEventListener("click", () => this._zoomBy(factor));
    }
    this.fillTable = lazyTable(panel.querySelector(".rounds-table"), () => roundTable(this.rounds));
    this._observer = new ResizeObserver(() => this._draw());
    this._observer.observe(this._plot);
  }

  /** What the axes must hold to show all of it. */
  get extent() {
    const ms = this.rounds.reduce((sum, round) => sum + round.round_ms, 0);
    return { ms, tokens: this.rounds.reduce((most, round) => Math.max(most, round.accepted + 1), 1) };
  }

  /** Draws on axes of this extent, so that two charts can be compared. */
  scaleTo(extent) {
    this._extent = extent;
    this._draw();
  }

  /** Draws rounds that have ended, behind the others. The axes grow in steps, so that a bar is drawn a few times in all. */
  add(rounds) {
    if (!rounds.length) return;
    if (!this.rounds.length) this._detail.textContent = READY;
    this.rounds.push(...rounds);
    const { ms, tokens } = this.extent;
    if (ms <= this._extent.ms && tokens <= this._extent.tokens) {
      this._drawFurther();
    } else {
      this._extent = { ms: niceStep(Math.max(1, ms)), tokens: Math.max(tokens, this._extent.tokens) };
      this._draw();
    }
  }

  /**
   * Draws all rounds on axes of their own length.
   * @param rounds what the last chunk tells of them: nothing of those before a coordinator was lost
   */
  finish(rounds) {
    if (rounds.length > this.rounds.length) this.rounds = rounds;
    this._extent = this.extent;
    this._detail.textContent = this.rounds.length ? READY : "No rounds were recorded.";
    this._draw();
  }

  end() {
    this._observer.disconnect();
  }

  _zoomBy(factor) {
    this._zoom = Math.max(1, Math.min(64, this._zoom * factor));
    this._draw();
  }

  _draw() {
    const room = this._plot.clientWidth;
    if (!this.rounds.length || !room) return;
    const width = Math.min(WIDEST, room * this._zoom);
    this._perMs = (width - 1) / this._extent.ms;
    this._chart = svg("svg", { width, height: HEIGHT + AXIS, "aria-hidden": "true" });
    this._chart.append(...axis(this._extent.ms, this._perMs, width));
    const current = this._groups.findIndex((group) => group.classList.contains("current"));
    this._groups = [];
    this._start = 0;
    this._drawFurther();
    this._groups[current]?.classList.add("current");
    this._plot.replaceChildren(this._chart);
  }

  /** Bars of the rounds that have none yet. */
  _drawFurther() {
    for (const round of this._chart ? this.rounds.slice(this._groups.length) : []) {
      const height = ((round.accepted + 1) / this._extent.tokens) * (HEIGHT - 6);
      const group = bar(round, this._start, this._perMs, height);
      group.dataset.index = this._groups.length;
      this._start += round.round_ms;
      this._groups.push(group);
      this._chart.append(group);
    }
  }
}

function svg(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function bar(round, start, perMs, height) {
  const group = svg("g", { class: round.drafter ? "round" : "round alone" });
  const width = round.round_ms * perMs;
  // A hairline between neighbours, as far as the bars are wide enough to lose it.
  const drawn = width > 3 ? (width - 1) / width : 1;
  let x = start * perMs;
  for (const [name, ms] of partsOf(round)) {
    group.append(svg("rect", { class: name, x, y: HEIGHT - height, width: ms * perMs * drawn, height }));
    x += ms * perMs * drawn;
  }
  group.append(svg("rect", { class: "catch", x: start * perMs, y: 0, width, height: HEIGHT }));
  return group;
}

function axis(total, perMs, width) {
  const step = niceStep(total / Math.max(2, width / 110));
  const marks = [svg("line", { class: "axis", x1: 0, x2: width, y1: HEIGHT + 0.5, y2: HEIGHT + 0.5 })];
  for (let ms = 0; ms <= total; ms += step) {
    const x = Math.round(ms * perMs) + 0.5;
    marks.push(svg("line", { class: "axis", x1: x, x2: x, y1: HEIGHT, y2: HEIGHT + 4 }));
    if (x > width - 50) continue;
    const label = svg("text", { x: x + 3, y: HEIGHT + 14 });
    label.textContent = step >= 1000 ? `${ms / 1000} s` : `${Number(ms.toFixed(3))} ms`;
    marks.push(label);
  }
  return marks;
}

/** The next of 1, 2, 5, 10, 20, … */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least);
}

function detailOf(round, index) {
  const drafted = round.drafter
    ? `${round.drafter}, ${round.accepted} of ${round.proposed} accepted${round.cache_hit ? ", drafted ahead" : ""}`
    : "target-only";
  const [wait, wire, verify, accept] = partsOf(round).map(([, ms]) => milliseconds(ms));
  return [
    `round ${index + 1}`,
    drafted,
    `${milliseconds(round.round_ms)}: draft wait ${wait}, wire ${wire}, verify ${verify}, accept ${accept}`,
    `${counted(round.target.rows, "row")} and ${counted(round.target.sessions, "session")} in the step`,
    ...(round.self_started ? ["started by the target"] : []),
  ].join(" · ");
}

function roundTable(rounds) {
  const heads = ["round", "drafter", "proposed", "accepted", "draft wait", "wire", "verify", "accept", "whole"];
  const rows = rounds.map((round, i) => [
    i + 1,
    round.drafter || "target-only",
    round.proposed,
    round.accepted,
    ...partsOf(round).map(([, ms]) => milliseconds(ms)),
    milliseconds(round.round_ms),
  ]);
  return table("Rounds and where their time went", heads, rows);
}
