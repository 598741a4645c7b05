// Where the draft parted from the target: each recovered token, and what was drafted in its place.
import { table } from "./dom.js";
import { percent, visible } from "./text.js";

const BEHIND = 24;

/** One object a parting, in the text's order: {place, behind, drafted, own, logprob, often}. */
export function partingsOf(tokens) {
  const counts = new Map();
  const pairOf = (token) => JSON.stringify([token.replaced, token.text]);
  const parted = tokens.map((token, i) => [token, i]).filter(([token]) => token.replaced !== undefined);
  for (const [token] of parted) counts.set(pairOf(token), (counts.get(pairOf(token)) ?? 0) + 1);
  return parted.map(([token, i]) => ({
    place: i + 1,
    behind: textBefore(tokens, i),
    drafted: token.replaced,
    own: token.text,
    logprob: token.logprob,
    often: counts.get(pairOf(token)),
  }));
}

/** The end of the text in front of a token; a character has at most two UTF-16 units. */
function textBefore(tokens, end) {
  let text = "";
  for (let i = end - 1; i >= 0 && text.length < 2 * BEHIND; i -= 1) text = tokens[i].text + text;
  return Array.from(text).slice(-BEHIND).join("");
}

/** The same for people. */
export function partingTable(tokens) {
  const rows = partingsOf(tokens).map(({ place, behind, drafted, own, logprob, often }) => [
    place,
    visible(behind, ""),
    visible(drafted),
    visible(own),
    logprob == null ? "" : percent(logprob),
    often,
  ]);
  const heads = ["#", "behind", "drafted", "the target's", "its probability", "times"];
  return table("Where the draft parted from the target", heads, rows);
}
