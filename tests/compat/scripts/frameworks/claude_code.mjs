// `claude -p` as a user runs it: its own tools, prompts and defaults, in a home of its own.
import { spawnSync } from "node:child_process";
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const [url, model, asked] = process.argv.slice(2);
const { text } = JSON.parse(asked);
const home = mkdtempSync(join(tmpdir(), "claude-code-"));
writeFileSync(join(home, "number.txt"), "forty-two");
const env = {
  PATH: process.env.PATH,
  HOME: home,
  ANTHROPIC_BASE_URL: url,
  ANTHROPIC_AUTH_TOKEN: "none",
  ANTHROPIC_MODEL: model,
  ANTHROPIC_SMALL_FAST_MODEL: model,
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
};

function claude(prompt, ...flags) {
  const program = join(import.meta.dirname, "node_modules", ".bin", "claude");
  const options = { cwd: home, env, encoding: "utf8", input: "", timeout: 120_000 };
  const done = spawnSync(program, ["-p", prompt, ...flags], options);
  if (done.status !== 0) throw new Error(`claude: ${done.status} ${done.error ?? ""}\n${done.stdout}\n${done.stderr}`);
  return done.stdout.trim();
}

const call = (name, args) => `<tool_call>\n${JSON.stringify({ name, arguments: args })}\n</tool_call>`;
const tell = (call, text) => console.log(JSON.stringify({ call, text }));

tell("text", claude(text));
const lines = claude(text, "--output-format", "stream-json", "--include-partial-messages", "--verbose").split("\n");
tell("text, streamed", JSON.parse(lines.at(-1)).result);
const read = call("Read", { file_path: join(home, "number.txt") });
const answer = claude(`Say «${read}», then «The file says: {result}»`);
tell("tool", answer.includes("forty-two") ? "The sum is 42." : answer);
