// One request to the gateway: what is sent, and its stream as tokens.
import { eventData } from "./sse.js";

const ALTERNATIVES = 3;

/** What the gateway said instead of an answer. */
export class Refusal extends Error {}

/**
 * Streams one generation. Yields {tokens, rounds} as they arrive, and {end} once, with what the last chunks say.
 * @param settings {input, prompt, temperature, seed, most, drafter, off, key}
 */
export async function* generate(settings, signal) {
  const headers = { "Content-Type": "application/json" };
  if (settings.key) headers.Authorization = `Bearer ${settings.key}`;
  const path = settings.input === "chat" ? "v1/chat/completions" : "v1/completions";
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(requestOf(settings)), signal });
  if (!response.ok) throw new Refusal(await refusalOf(response));
  const end = { finish: null, seed: null, rounds: null, speculation: null };
  let ended = false;
  for await (const data of eventData(response.body)) {
    ended = data === "[DONE]";
    if (ended) break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(chunk.error.message);
    note(end, chunk);
    const tokens = tokensOf(chunk);
    if (tokens.length) yield { tokens, rounds: chunk.paceline?.ended_rounds ?? [] };
  }
  if (!ended) throw new Refusal("The stream broke off before the text had ended.");
  yield { end };
}

function requestOf(settings) {
  const speculation = { rounds: true };
  if (settings.off) speculation.off = true;
  else if (settings.drafter) speculation.drafter = settings.drafter;
  const common = {
    stream: true,
    stream_options: { include_usage: true },
    temperature: settings.temperature,
    seed: settings.seed,
    max_tokens: settings.most,
    paceline: speculation,
  };
  if (settings.input !== "chat") return { ...common, prompt: settings.prompt, logprobs: ALTERNATIVES };
  const messages = [{ role: "user", content: settings.prompt }];
  return { ...common, messages, logprobs: true, top_logprobs: ALTERNATIVES };
}

/** What an answer without success says. */
export async function refusalOf(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `The gateway answered with status ${response.status}.`;
}

function note(end, chunk) {
  const choice = chunk.choices?.[0];
  end.finish = choice?.finish_reason ?? end.finish;
  end.seed = chunk.paceline?.seed ?? end.seed;
  end.rounds = chunk.paceline?.rounds ?? end.rounds;
  end.speculation = chunk.metrics?.speculative_decoding ?? end.speculation;
}

/** A chunk's tokens: {id, text, provenance, logprob, alternatives, replaced}; without an id: more of the last one's text. */
export function tokensOf(chunk) {
  const choice = chunk.choices?.[0];
  const text = choice?.text ?? choice?.delta?.content ?? choice?.delta?.reasoning_content ?? "";
  const { token_ids: ids = [], provenance = [], text_ends: ends = [], replaced = [] } = chunk.paceline ?? {};
  // Ends count code points; a string's own indices count UTF-16 units.
  const points = Array.from(text);
  if (!ids.length) return text ? [{ id: null, text }] : [];
  const drafts = replaced[Symbol.iterator]();
  const probabilities = probabilitiesOf(choice?.logprobs);
  return ids.map((id, i) => ({
    id,
    // The last one has what the chunk has beyond: text that was held back.
    text: points.slice(i ? ends[i - 1] : 0, i === ids.length - 1 ? undefined : ends[i]).join(""),
    provenance: provenance[i],
    replaced: provenance[i] === "recovered" ? drafts.next().value : undefined,
    ...probabilities[i],
  }));
}

/** {logprob, alternatives: [{text, logprob}]} of each token, from either API's shape. */
function probabilitiesOf(logprobs) {
  if (logprobs?.content) {
    return logprobs.content.map((row) => ({
      logprob: row.logprob,
      alternatives: (row.top_logprobs ?? []).map((each) => ({ text: each.token, logprob: each.logprob })),
    }));
  }
  return (logprobs?.token_logprobs ?? []).map((logprob, i) => ({
    logprob,
    alternatives: Object.entries(logprobs.top_logprobs?.[i] ?? {})
      .map(([text, each]) => ({ text, logprob: each }))
      .sort((one, other) => other.logprob - one.logprob),
  }));
}
