// The queue of events that wait for the client's loop. One reader; `push` and `wake` end its wait.

const IDLE_MS = 60_000;

/** Events in their order. */
export class Inbox {
  constructor() {
    this.events = [];
    this.wake = () => {}; // ends the nap of `next`, if there is one
  }

  push(event) {
    this.events.push(event);
    this.wake();
  }

  /** The next event, or undefined after `ms` or a `wake`. */
  async next(ms) {
    if (!this.events.length && ms > 0) {
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, Math.min(ms, IDLE_MS));
        this.wake = () => {
          clearTimeout(timer);
          resolve();
        };
      });
      this.wake = () => {};
    }
    return this.events.shift();
  }
}

/** One turn of the page's event loop; timers would be slowed down in a page that is not in front. */
export function yieldToPage() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}
