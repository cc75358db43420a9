// The buttons. A command that may do harm needs a confirmation; one that is not possible now is disabled.

import { ask, byId, setText } from "./dom.js";
import { forgetToken, hasControl, keepToken, Refused, sendCommand } from "./remote.js";
import { isDone, state } from "./state.js";

const TRAINED = ["exporting", "serving", "stopped"]; // phases without a further exchange: nothing can be paused

export function notice(words, { plain = isDone() } = {}) { // not a warning where all is done
  byId("notice").classList.toggle("plain", plain);
  setText("notice", words);
  byId("notice").hidden = !words;
}

async function send(body) {
  try {
    await sendCommand(body);
    if (state.alive) notice(""); // after a stop the stream may have ended first and set its own notice
  } catch (wrong) {
    if (wrong instanceof Refused && (wrong.status === 401 || wrong.status === 403)) forgetToken("control");
    notice(wrong instanceof Refused ? `Not done: ${wrong.message}.` : "Not done: the coordinator does not answer.");
    show();
  }
}

async function closeRound() {
  const seen = state.now.exchange;
  if (!seen) return;
  const missing = seen.wanted - seen.answered;
  const few = seen.answered < seen.quorum;
  const words = `${seen.answered} of ${seen.wanted} devices have answered. ` + (few
    ? `That is below the quorum of ${seen.quorum}: unless below-quorum = "continue" is set, the coordinator will end, and repeat the exchange when it is started again.`
    : `The round goes on without the other ${missing}.`);
  if (await ask({ title: `Close round ${seen.round} now?`, words, yes: "Close round", danger: few })) {
    await send({ do: "close", exchange: { id: seen.id, round: seen.round, exchange: seen.exchange } });
  }
}

async function stop() {
  const words = "The coordinator ends where nothing is half done. Everything is kept: started again with the same folder, it goes on from there.";
  if (await ask({ title: "Stop the coordinator?", words, yes: "Stop", danger: true })) await send({ do: "stop" });
}

export async function askToken(kind, words) {
  const token = await ask({ title: kind === "read" ? "This dashboard is locked" : "Steer this run", words, yes: "Unlock", field: "Token" });
  if (token) keepToken(kind, token);
  show();
  return token;
}

export function show() {
  const { phase, paused, exchange } = state.now;
  const may = hasControl() && state.alive && phase !== "stopped";
  const trains = !isDone() && !TRAINED.includes(phase);
  byId("pause").textContent = paused ? "Resume" : "Pause";
  byId("pause").disabled = !may;
  byId("close").disabled = !may || !exchange || exchange.closed;
  byId("stop").disabled = !may;
  byId("unlock").hidden = hasControl() || !state.alive;
  for (const id of ["pause", "close"]) byId(id).hidden = !hasControl() || !trains;
  if (exchange?.updates) byId("close").hidden = true; // there is no round to close
  byId("stop").hidden = byId("more").hidden = !hasControl() || (isDone() && !state.alive);
}

export function begin() {
  byId("pause").onclick = () => send({ do: state.now.paused ? "resume" : "pause" });
  byId("more").onclick = () => {
    const open = byId("controls").classList.toggle("open");
    byId("more").setAttribute("aria-expanded", String(open));
  };
  byId("close").onclick = closeRound;
  byId("stop").onclick = stop;
  byId("unlock").onclick = () => askToken("control", "The link that the coordinator printed holds the control token after #control=. Or enter it here.");
}
