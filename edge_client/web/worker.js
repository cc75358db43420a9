// The service worker: the page opens without the coordinator, from the files that came with it. The coordinator writes VERSION
// and FILES ({address: checksum}) before these lines (coordinator/phone/page_files.py).
// The page itself comes from the coordinator whenever that answers; its modules have their version in their address. So an
// old program runs only while there is no coordinator, and then it does not train (join.js).

const OURS = "fedcenters-page/";
const PLACE = new URL(registration.scope).pathname; // another coordinator may have its page below another path of this address
const CACHE = OURS + VERSION + PLACE;
const PATIENCE_MS = 8_000;

self.addEventListener("install", (event) => event.waitUntil(keepAll()));
self.addEventListener("activate", (event) => event.waitUntil(forgetOthers()));
self.addEventListener("fetch", (event) => {
  const { request } = event;
  if (request.method !== "GET") return;
  if (request.mode === "navigate") event.respondWith(openPage(request));
  else if (Object.hasOwn(FILES, addressOf(request))) event.respondWith(openFile(request));
});

/**
 * All files: one with another checksum fails the installation, and the worker before stays. What it has under the same address
 * is the same file, since the address has a hash in it; only the page's own address has none.
 */
async function keepAll() {
  const cache = await caches.open(CACHE);
  const keep = async ([address, integrity]) => {
    const had = address === "./" ? undefined : await caches.match(address, { ignoreVary: true });
    await (had ? cache.put(address, had) : cache.add(new Request(address, { integrity })));
  };
  await Promise.all(Object.entries(FILES).map(keep));
}

/** What is left of other versions, whose names once had no place. This one becomes active when no page of theirs is open. */
async function forgetOthers() {
  const isOther = (name) => name.startsWith(OURS) && name !== CACHE && ["", PLACE].includes(name.slice(OURS.length + VERSION.length));
  const names = await caches.keys();
  await Promise.all(names.filter(isOther).map((name) => caches.delete(name)));
}

async function openPage(request) {
  try {
    const answer = await fetch(request, { signal: AbortSignal.timeout(PATIENCE_MS) });
    if (answer.status < 500 && answer.status !== 429) return answer; // as join.js has it
  } catch {
    // no network, or no coordinator
  }
  return (await kept("./")) ?? Response.error();
}

async function openFile(request) {
  return (await kept(addressOf(request))) ?? fetch(request);
}

async function kept(address) {
  return (await caches.open(CACHE)).match(address, { ignoreVary: true });
}

function addressOf(request) {
  return request.url.startsWith(registration.scope) ? request.url.slice(registration.scope.length) : null;
}
