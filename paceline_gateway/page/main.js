// The form and what it starts.
import { announcer } from "./announcer.js";
import { watchCluster } from "./cluster.js";
import { element } from "./dom.js";
import { Panel } from "./panel.js";

const at = (id) => document.getElementById(id);
const say = announcer(at("announcer"));
let running = null;
let panels = [];

function settingsOf() {
  const given = at("seed").value.trim();
  const seed = given === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number(given);
  if (given !== "" && !/^\d+$/.test(given)) throw new Error(`Seed: ${given} is not a whole number from 0 on.`);
  if (!Number.isSafeInteger(seed)) throw new Error(`Seed: this page can send numbers up to ${Number.MAX_SAFE_INTEGER}.`);
  return {
    input: at("input").value,
    prompt: at("prompt").value,
    temperature: at("temperature").valueAsNumber,
    seed,
    most: at("most").valueAsNumber,
    drafter: at("drafter").value === "none" ? "" : at("drafter").value,
    off: at("drafter").value === "none",
    key: at("key").value,
  };
}

function newPanels(titles) {
  panels.forEach((panel) => panel.remove());
  at("comparison").hidden = true;
  at("panels").classList.toggle("pair", titles.length > 1);
  panels = titles.map((title) => new Panel(at("panels"), title));
}

/** Runs the panels one after the other, so that neither takes the other's time. */
async function runAll(plans) {
  if (running || !at("request").reportValidity()) return;
  at("problem").textContent = "";
  running = new AbortController();
  setRunning(true);
  try {
    const settings = settingsOf();
    newPanels(plans.map((plan) => plan.title));
    for (const [i, plan] of plans.entries()) {
      say(`${plan.title}: generating`, { now: true });
      await panels[i].run({ ...settings, ...plan.change }, running.signal, (count) => say(`${count} tokens`));
    }
    if (plans.length > 1) compare(...panels);
    say(`Done: ${panels.map((panel) => `${panel.text.tokens.length} tokens`).join(", ")}`, { now: true });
  } catch (error) {
    tell(error);
  } finally {
    running = null;
    setRunning(false);
  }
}

function tell(error) {
  if (error.name === "AbortError") {
    say("Stopped", { now: true });
  } else {
    at("problem").textContent = error instanceof TypeError ? `The gateway can't be reached: ${error.message}` : error.message;
  }
}

function compare(drafted, alone) {
  const same = drafted.text.content === alone.text.content;
  const ratio = drafted.speed && alone.speed ? `${(drafted.speed / alone.speed).toFixed(2)} times` : "not measured:";
  at("comparison").textContent =
    `${same ? "The texts are the same" : "The texts differ"}. With drafts: ${ratio} the speed of target-only.`;
  const extents = [drafted, alone].map((panel) => panel.rounds.extent);
  const extent = { ms: Math.max(...extents.map((each) => each.ms)), tokens: Math.max(...extents.map((each) => each.tokens)) };
  for (const panel of [drafted, alone]) panel.rounds.scaleTo(extent);
  at("comparison").classList.toggle("differs", !same);
  at("comparison").hidden = false;
}

function setRunning(is) {
  // A button that is really disabled would lose the focus of whoever has just pressed it.
  for (const [id, off] of [["run", is], ["both", is], ["stop", !is]]) at(id).setAttribute("aria-disabled", String(off));
  at("panels").setAttribute("aria-busy", String(is));
}

function offerDrafters(models) {
  const names = models[0]?.drafters ?? [];
  const offered = [...at("drafter").options].slice(1, -1).map((option) => option.value);
  if (JSON.stringify(offered) === JSON.stringify(names)) return;
  const chosen = at("drafter").value;
  const options = [["", names[0] ? `default (${names[0]})` : "default"], ...names.map((name) => [name, name])];
  at("drafter").replaceChildren(...[...options, ["none", "none"]].map(([value, text]) => {
    const option = element("option", "", text);
    option.value = value;
    return option;
  }));
  at("drafter").value = chosen;
  if (at("drafter").selectedIndex < 0) at("drafter").value = "";
}

function keepTheme() {
  const set = (value) => document.documentElement.style.setProperty("color-scheme", value);
  try {
    at("theme").value = localStorage.getItem("theme") ?? "light dark";
  } catch { /* a browser that keeps nothing */ }
  if (at("theme").selectedIndex < 0) at("theme").selectedIndex = 0;
  set(at("theme").value);
  at("theme").addEventListener("change", () => {
    set(at("theme").value);
    try {
      localStorage.setItem("theme", at("theme").value);
    } catch { /* the choice lasts as long as the page */ }
  });
}

const generateOnce = () => runAll([{ title: "Generated", change: {} }]);
at("request").addEventListener("submit", (event) => {
  event.preventDefault();
  generateOnce();
});
at("both").addEventListener("click", () => {
  runAll([{ title: "With drafts", change: { off: false } }, { title: "Target-only", change: { off: true } }]);
});
at("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) generateOnce();
});
keepTheme();
watchCluster({ view: at("cluster"), state: at("cluster-state"), served: at("served") }, () => at("key").value, offerDrafters);
