// Requests to the server: one stream of events, JSON, files, and commands. Tokens travel in the header Authorization.

const store = sessionStorage;
const SILENT_MS = 35_000; // the stream says something every 10 s: after so long it is dead, though neither side has closed it
const ANSWER_MS = 30_000; // for all else but downloads

function takeTokens() { // from the link's fragment, which no server receives; they are then removed from the address
  const given = new URLSearchParams(location.hash.slice(1));
  for (const kind of ["read", "control"]) if (given.get(kind)) store.setItem(kind, given.get(kind));
  if (given.get("read") || given.get("control")) history.replaceState(null, "", location.pathname);
}
takeTokens();
addEventListener("hashchange", takeTokens);

export const hasControl = () => Boolean(store.getItem("control"));
export const forgetToken = (kind) => store.removeItem(kind);
export const keepToken = (kind, token) => store.setItem(kind, token);

function headers(kind) {
  const token = kind === "control" ? store.getItem("control") : store.getItem("read") ?? store.getItem("control");
  return token && /^[\x21-\x7e]+$/.test(token) ? { Authorization: `Bearer ${token}` } : {};
}

export class Refused extends Error {
  constructor(status, words) { super(words); this.status = status; }
}

async function checkResponse(response) {
  if (response.ok) return response;
  const words = await response.json().then((body) => body.error, () => response.statusText);
  throw new Refused(response.status, String(words));
}

const answersSoon = () => AbortSignal.timeout(ANSWER_MS);
// What ends a request that is not answered: the network, or our patience.
export const isLost = (wrong) => wrong instanceof TypeError || ["AbortError", "TimeoutError"].includes(wrong.name);

export const fetchJson = async (path) => (await checkResponse(await fetch(path, { headers: headers("read"), signal: answersSoon() }))).json();
export const fetchBlob = async (path) => (await checkResponse(await fetch(path, { headers: headers("read") }))).blob();
export const sendCommand = async (body) =>
  (await checkResponse(await fetch("api/control", {
    method: "POST",
    headers: { ...headers("control"), "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal: answersSoon(),
  }))).json();

// Call `take(kind, data)` for every event until the server ends the stream. Throws Refused, or an error of a stream that is lost.
export async function stream(take) {
  const patience = new AbortController();
  let silence = 0;
  const heard = () => {
    clearTimeout(silence);
    silence = setTimeout(() => patience.abort(), SILENT_MS);
  };
  heard();
  try {
    await follow(take, patience.signal, heard);
  } finally {
    clearTimeout(silence);
  }
}

async function follow(take, signal, heard) {
  const response = await checkResponse(await fetch("api/stream", { headers: headers("read"), cache: "no-store", signal }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    heard();
    if (done) return;
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n");
      const kind = lines.find((line) => line.startsWith("event: "))?.slice(7);
      const data = lines.find((line) => line.startsWith("data: "))?.slice(6);
      if (kind && data) take(kind, JSON.parse(data));
    }
  }
}
