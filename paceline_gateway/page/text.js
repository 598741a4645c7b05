// The generated text, token by token.
import { element, lazyTable, table } from "./dom.js";
import { stepper } from "./stepper.js";

/** What a token is called whose text comes with a later one, or never. */
const UNSEEN = "(no text yet)";
export const PROVENANCES = ["accepted", "recovered", "bonus", "target"];

/** The text of one panel. */
export class TextView {
  constructor(panel) {
    this.tokens = [];
    this._text = panel.querySelector(".text");
    this._detail = panel.querySelector(".token-detail");
    this._spans = [];
    stepper(this._text, { count: () => this._spans.length, at: (i) => this._spans[i] }, (i) => {
      this._detail.textContent = detailOf(this.tokens[i], i);
    });
    /** Brings the table up to date, if it is open. */
    this.fillTable = lazyTable(panel.querySelector(".tokens-table"), () => tokenTable(this.tokens));
  }

  /** Everything generated so far. */
  get content() {
    return this.tokens.map((token) => token.text).join("");
  }

  add(tokens) {
    const atEnd = this._text.scrollHeight - this._text.scrollTop - this._text.clientHeight < 40;
    for (const token of tokens) {
      if (token.id === null && this.tokens.length) {
        this.tokens.at(-1).text += token.text;
        this._spans.at(-1).append(token.text);
        continue;
      }
      const known = PROVENANCES.includes(token.provenance) ? token.provenance : "target";
      const span = element("span", `token ${known}`, token.text);
      span.dataset.index = this._spans.length;
      this.tokens.push(token);
      this._spans.push(span);
      this._text.append(span);
    }
    if (atEnd) this._text.scrollTop = this._text.scrollHeight;
  }
}

function detailOf(token, index) {
  const parts = [`${index + 1}. ${visible(token.text, UNSEEN)}`, token.provenance];
  if (token.logprob != null) parts.push(`probability ${percent(token.logprob)}`);
  const choice = draftsChoice(token);
  if (choice) parts.push(`the draft chose ${choice}`);
  const others = (token.alternatives ?? []).filter((each) => each.text !== token.text);
  if (others.length) {
    parts.push(`next to ${others.map((each) => `${visible(each.text)} ${percent(each.logprob)}`).join(", ")}`);
  }
  return parts.join(" · ");
}

function draftsChoice(token) {
  if (token.provenance === "accepted") return "the same";
  return token.replaced === undefined ? "" : visible(token.replaced);
}

/** A token's text in quotes, with what can't be seen made visible. Of a token by itself only special ones have none. */
export function visible(text, none = "(a special token)") {
  if (!text) return none;
  return `“${text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("\r", "␍")}”`;
}

/** A logarithm of a probability, in percent. */
export function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return `${share >= 10 ? share.toFixed(0) : share >= 0.1 ? share.toFixed(1) : "< 0.1"} %`;
}

function tokenTable(tokens) {
  const rows = tokens.map((token, i) => [
    i + 1,
    visible(token.text, UNSEEN),
    token.provenance,
    token.logprob == null ? "" : percent(token.logprob),
    draftsChoice(token),
  ]);
  return table("Tokens of the text", ["#", "token", "provenance", "probability", "draft's choice"], rows);
}
