// The coordinators, their peers, the links between them and what each has to do.
import { counted, element, milliseconds } from "./dom.js";
import { Refusal, refusalOf } from "./generation.js";

const PERIOD_MS = 2000;
const PATIENCE_MS = 5000;

/**
 * Asks the gateway from time to time, while the page is seen, and shows the answer.
 * @param places {view, state, served}
 * @param key the API key, if there is one
 * @param onModels called with the models that are served
 */
export function watchCluster(places, key, onModels) {
  let shown = "";

  async function look() {
    const headers = key() ? { Authorization: `Bearer ${key()}` } : {};
    const response = await fetch("cluster", { headers, signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!response.ok) throw new Refusal(await refusalOf(response));
    const body = await response.json();
    const coordinators = body.coordinators;
    const models = coordinators.flatMap((each) => each.models ?? []);
    places.state.textContent = summaryOf(coordinators);
    places.served.textContent = models[0]?.name ?? "no coordinator answers";
    // Unchanged elements keep focus and a reader's place.
    if (JSON.stringify(body) !== shown) places.view.replaceChildren(...coordinators.map(coordinatorView));
    shown = JSON.stringify(body);
    onModels(models);
  }

  async function turn() {
    if (document.visibilityState === "visible") {
      await look().catch((error) => {
        const refused = error instanceof Refusal;
        places.served.textContent = refused ? "not told" : "no answer";
        places.state.textContent = refused ? error.message : `The gateway does not answer: ${error.message}`;
      });
    }
    setTimeout(turn, PERIOD_MS);
  }
  turn();
}

function summaryOf(coordinators) {
  const peers = coordinators.flatMap((each) => each.models ?? []).flatMap((model) => model.peers);
  const count = (role) => {
    const all = peers.filter((peer) => peer.role === role);
    return `${all.filter((peer) => peer.up).length} of ${all.length}`;
  };
  const answering = coordinators.filter((each) => each.reachable).length;
  return `Coordinators that answer: ${answering} of ${coordinators.length}. ` +
    `Linked targets: ${count("target")}, draft services: ${count("draft")}.`;
}

function coordinatorView(coordinator) {
  const peers = (coordinator.models ?? []).flatMap((model) => model.peers);
  const column = (role, title) => {
    const cards = peers.filter((peer) => peer.role === role).map((peer) => element("li", "", peerCard(peer)));
    const list = cards.length ? element("ul", "", ...cards) : element("p", "hint", "none");
    return element("div", `column ${role}`, element("h3", "", title), list);
  };
  const facts = coordinator.reachable
    ? [
      ...(coordinator.models ?? []).flatMap((model) => [["model", model.name], ["context", `${model.max_length} tokens`]]),
      ["requests", coordinator.requests],
    ]
    : [["problem", coordinator.problem ?? "no answer"]];
  const card = element("div", "card", state(coordinator.reachable, "answers", "no answer"),
    element("p", "address", coordinator.address), factList(facts));
  const middle = element("div", "column coordinator", element("h3", "", "Coordinator"), card);
  return element("div", "coordinator-view", column("draft", "Draft services"), middle, column("target", "Targets"));
}

function peerCard(peer) {
  const facts = [
    ["model", peer.model || "not known yet"],
    ["sessions", peer.sessions],
    ["queue", peer.queue],
  ];
  if (peer.step_rows) facts.push(["latest step", `${counted(peer.step_rows, "row")}, ${counted(peer.step_sessions, "session")}`]);
  if (peer.step_ms) facts.push(["step of one row", milliseconds(peer.step_ms)]);
  if (peer.group) facts.push(["group", groupLine(peer.group)]);
  if (peer.problem) facts.push(["problem", peer.problem]);
  return element("div", peer.up ? "card" : "card down", state(peer.up, "linked", "link down"),
    element("p", "address", peer.address), factList(facts));
}

/** What the requests of a target do together, and what it gains them. */
export function groupLine(group) {
  if (group.sessions <= 1) return "one request at most, by its own account";
  const gain = group.modes.find((mode) => mode.name === group.mode)?.gain;
  const does = (name) => ({ rest: "rest", matches: "copy matches", drafts: "draft" })[name] ?? name;
  const facts = gain ? [does(group.mode), `${gain.toFixed(2)} × resting`] : [does(group.mode)];
  const [next] = group.modes.filter((mode) => mode.wait_steps > 0).sort((one, other) => one.wait_steps - other.wait_steps);
  if (next) facts.push(`may ${does(next.name)} in ${counted(Math.ceil(next.wait_steps), "step")}`);
  return facts.join(", ");
}

function state(up, yes, no) {
  return element("p", up ? "link up" : "link down", `${up ? "●" : "○"} ${up ? yes : no}`);
}

function factList(facts) {
  return element("dl", "", ...facts.map(([name, value]) => {
    return element("div", "", element("dt", "", name), element("dd", "", value));
  }));
}
