// The server as this page speaks to it: one stream of what happens, questions, and orders. Tokens travel in a header.

const store = sessionStorage;

function takeTokens() { // from the link's end, which is sent to no server; then they leave the address
  const given = new URLSearchParams(location.hash.slice(1));
  for (const kind of ["read", "control"]) if (given.get(kind)) store.setItem(kind, given.get(kind));
  if (given.get("read") || given.get("control")) history.replaceState(null, "", location.pathname);
}
takeTokens();
addEventListener("hashchange", takeTokens);

export const hasControl = () => Boolean(store.getItem("control"));
export const forget = (kind) => store.removeItem(kind);
export const keep = (kind, token) => store.setItem(kind, token);

function headers(kind) {
  const token = kind === "control" ? store.getItem("control") : store.getItem("read") ?? store.getItem("control");
  return token && /^[\x21-\x7e]+$/.test(token) ? { Authorization: `Bearer ${token}` } : {};
}

export class Refused extends Error {
  constructor(status, words) { super(words); this.status = status; }
}

async function answered(response) {
  if (response.ok) return response;
  const words = await response.json().then((body) => body.error, () => response.statusText);
  throw new Refused(response.status, String(words));
}

export const question = async (path) => (await answered(await fetch(path, { headers: headers("read") }))).json();
export const blob = async (path) => (await answered(await fetch(path, { headers: headers("read") }))).blob();
export const order = async (body) =>
  (await answered(await fetch("api/control", {
    method: "POST",
    headers: { ...headers("control"), "Content-Type": "application/json" },
    body: JSON.stringify(body),
  }))).json();

// Calls `take(kind, data)` for every event, until the server ends the stream. Throws Refused or a network's error.
export async function stream(take) {
  const response = await answered(await fetch("api/stream", { headers: headers("read"), cache: "no-store" }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
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
