// Runs where its packages are: URL MODEL PROMPT TOKENS SEED. One line of JSON a call.
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const [url, model, prompt, tokens, seed] = process.argv.slice(2);
const messages = [{ role: "user", content: prompt }];
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const limits = { max_tokens: Number(tokens), seed: Number(seed) };

function tell(call, kind, text) {
  console.log(JSON.stringify({ call, kind, text }));
}

async function joined(stream, text) {
  let all = "";
  for await (const event of stream) all += text(event) ?? "";
  return all;
}

const chat = await openai.chat.completions.create({ model, messages, ...limits });
tell("openai chat", "chat", chat.choices[0].message.content);
const chunks = await openai.chat.completions.create({ model, messages, ...limits, stream: true });
tell("openai chat, streamed", "chat", await joined(chunks, (chunk) => chunk.choices[0]?.delta?.content));

const completion = await openai.completions.create({ model, prompt, ...limits });
tell("openai completion", "completion", completion.choices[0].text);
const pieces = await openai.completions.create({ model, prompt, ...limits, stream: true });
tell("openai completion, streamed", "completion", await joined(pieces, (chunk) => chunk.choices[0]?.text));

const asked = { model, input: prompt, max_output_tokens: limits.max_tokens, seed: limits.seed };
const response = await openai.responses.create(asked);
tell("openai response", "chat", response.output_text);
const events = await openai.responses.create({ ...asked, stream: true });
tell("openai response, streamed", "chat", await joined(events, (event) => event.type === "response.output_text.delta" ? event.delta : ""));

const message = await anthropic.messages.create({ model, messages, ...limits });
tell("anthropic message", "chat", message.content[0].text);
const stream = anthropic.messages.stream({ model, messages, ...limits });
tell("anthropic message, streamed", "chat", await stream.finalText());
