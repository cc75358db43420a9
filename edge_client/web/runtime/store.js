// Persistent storage: names and values in one IndexedDB database per federation and device; a write is one transaction.
// Blobs are stored under their hash, partial ones block by block.

import { Bitmap, bodyRange, inlineBytes, totalOf } from "../protocol/blocks.js";
import { sha256 } from "../protocol/bytes.js";
import { Malformed } from "../protocol/errors.js";

const OBJECT_STORE = "kept";
const BLOB = "blob/";
const BLOCK = "block/";
const GONE = "this browser has deleted what this page had kept, as when its site data are cleared. Load the page again";

/** The browser has no room for what was to be written; what is stored is as before. */
export class NoRoom extends Error {}

/** Names and values; `write` is one transaction that is on the disk when it returns. Throws NoRoom. */
export class Store {
  constructor(database) {
    this.database = database;
    this.gone = new Promise((_, reject) => { // rejects once the browser has taken the storage away
      database.onclose = () => reject(new Error(GONE));
    });
    this.gone.catch(() => {}); // not every owner waits for it
  }

  static async open(name) {
    try {
      const request = indexedDB.open(name, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(OBJECT_STORE);
      return new Store(await settled(request));
    } catch (wrong) {
      if (isFull(wrong)) throw inWords(wrong);
      throw new Error(`this browser lends this page no storage (${wrong.message}). A private window or blocked site data may be why: open it in an ordinary window, and allow its data`);
    }
  }

  async get(name) {
    return this.read((kept) => kept.get(name));
  }

  /** The names that begin with `prefix`, sorted. */
  async names(prefix) {
    return this.read((kept) => kept.getAllKeys(range(prefix)));
  }

  /** The values whose names begin with `prefix`, in the order of the names. */
  async values(prefix) {
    return this.read((kept) => kept.getAll(range(prefix)));
  }

  async write(put, remove = []) {
    const transaction = this.transaction("readwrite", { durability: "strict" });
    const objectStore = transaction.objectStore(OBJECT_STORE);
    for (const [name, value] of Object.entries(put)) objectStore.put(value, name);
    for (const name of remove) objectStore.delete(name);
    await new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(inWords(transaction.error)); // an error of a request aborts it, and is its error
    });
  }

  async read(ask) {
    return settled(ask(this.transaction("readonly").objectStore(OBJECT_STORE))).catch((wrong) => {
      throw wrong?.name === "AbortError" ? inWords(wrong) : wrong;
    });
  }

  transaction(mode, options) {
    try {
      return this.database.transaction(OBJECT_STORE, mode, options);
    } catch { // it is closed
      throw new Error(GONE);
    }
  }
}

/** Blobs named by their hash; what was fetched in part goes on where it stopped. */
export class Blobs {
  constructor(store) {
    this.store = store;
  }

  async has(hash) {
    return (await this.store.names(BLOB + hash)).length > 0;
  }

  /** The bytes, hashed again: a damaged blob is dropped, and Malformed. */
  async read(hash) {
    const data = await this.store.get(BLOB + hash);
    if (data !== undefined && (await sha256(data)) === hash) return data;
    await this.store.write({}, [BLOB + hash]);
    throw new Malformed("bad_hash", `blob ${hash.slice(0, 16)} is not here, or damaged`);
  }

  async putInline(manifest) {
    await this.store.write({ [BLOB + manifest.sha256]: inlineBytes(manifest) });
  }

  /** Which blocks of a blob are here. */
  async arrivedBlocks(manifest) {
    const bitmap = new Bitmap(totalOf(manifest));
    const prefix = partial(manifest);
    for (const name of await this.store.names(prefix)) bitmap.add(Number(name.slice(prefix.length)));
    return bitmap;
  }

  async putBlock(manifest, index, body) {
    await this.store.write({ [partial(manifest) + String(index).padStart(5, "0")]: body });
  }

  /** All blocks are here: the whole hash decides. Malformed("bad_hash") leaves nothing of them. */
  async finish(manifest) {
    const data = new Uint8Array(manifest.size);
    const names = await this.store.names(partial(manifest));
    for (const [index, name] of names.entries()) data.set(await this.store.get(name), bodyRange(manifest, index)[0]);
    const right = (await sha256(data)) === manifest.sha256;
    await this.store.write(right ? { [BLOB + manifest.sha256]: data } : {}, names);
    if (!right) throw new Malformed("bad_hash", `blob ${manifest.sha256.slice(0, 16)}: the whole hash differs`);
  }

  /** Forget every blob but these, and every partial one but these. */
  async keepOnly(hashes) {
    const blobs = (await this.store.names(BLOB)).filter((name) => !hashes.has(name.slice(BLOB.length)));
    const blocks = (await this.store.names(BLOCK)).filter((name) => !hashes.has(name.split("/")[1]));
    if (blobs.length || blocks.length) await this.store.write({}, [...blobs, ...blocks]);
  }
}

const partial = ({ sha256: hash, block }) => `${BLOCK}${hash}/${block}/`;
const range = (prefix) => IDBKeyRange.bound(prefix, `${prefix}\uffff`);

const isFull = (wrong) => wrong?.name === "QuotaExceededError";

function inWords(wrong) {
  if (wrong?.name === "AbortError") return new Error(GONE); // only the browser aborts what is under way, when it takes the storage away
  if (isFull(wrong)) return new NoRoom("this phone has no room left for this page: nothing was added or changed. Free some, then try again");
  return new Error(`the browser did not store it: ${wrong?.message || wrong?.name || "it gives no reason"}`);
}

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
