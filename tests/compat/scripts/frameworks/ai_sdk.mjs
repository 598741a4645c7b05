import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, Output, streamText, tool } from "ai";
import { z } from "zod";

const [url, name, asked] = process.argv.slice(2);
const { text, tool: call, "schema and tool": both } = JSON.parse(asked);
const provider = createOpenAICompatible({ name: "paceline", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true });
const model = provider(name);
const inputSchema = z.object({ a: z.number().int(), b: z.number().int() });
const tools = { add: tool({ description: "Add two numbers.", inputSchema, execute: async ({ a, b }) => a + b }) };
const loop = { model, tools, stopWhen: stepCountIs(3) };
const tell = (call, text) => console.log(JSON.stringify({ call, text }));

tell("text", (await generateText({ model, prompt: text })).text);
let pieces = "";
for await (const piece of streamText({ model, prompt: text }).textStream) pieces += piece;
tell("text, streamed", pieces);
tell("tool", (await generateText({ ...loop, prompt: call })).text);
tell("tool, streamed", await streamText({ ...loop, prompt: call }).text);
const schema = z.object({ city: z.string(), bridges: z.number().int() });
const { output } = await generateText({ ...loop, prompt: both, output: Output.object({ schema }) });
tell("schema and tool", `${output.city} ${output.bridges}`);
