// The store of the page without a browser.

/** What store.js's Store promises, in memory. */
export class MemoryStore {
  constructor(kept = new Map()) {
    this.kept = kept;
  }

  async get(name) {
    return this.kept.get(name);
  }

  async names(prefix) {
    return [...this.kept.keys()].filter((name) => name.startsWith(prefix)).sort();
  }

  async values(prefix) {
    return (await this.names(prefix)).map((name) => this.kept.get(name));
  }

  async write(put, remove = []) {
    for (const [name, value] of Object.entries(put)) this.kept.set(name, structuredClone(value)); // as IndexedDB does
    for (const name of remove) this.kept.delete(name);
  }
}
