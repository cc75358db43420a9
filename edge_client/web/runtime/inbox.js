// The queue of events that wait for the client's loop. One reader; `push` and `wake` end its wait. The messages among them
// are bounded in bytes: one beyond the bound is dropped, as if the broker had lost it (event_queue.py).

const IDLE_MS = 60_000;
const MAX_WAITING_BYTES = 64 << 20;
const MESSAGE_BYTES = 1024; // that a message counts beside its topic and payload

/** Events in their order. */
export class Inbox {
  constructor(most = MAX_WAITING_BYTES) {
    this.events = [];
    this.most = most;
    this.waiting = 0; // bytes
    this.wake = () => {}; // ends the nap of `next`, if there is one
  }

  push(event) {
    const size = sizeOf(event);
    if (size > 0 && this.waiting + size > this.most) return;
    this.waiting += size;
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
    if (!this.events.length) return undefined;
    const event = this.events.shift();
    this.waiting -= sizeOf(event);
    return event;
  }
}

/** What an event counts: a character of a topic may take two bytes. */
function sizeOf({ kind, topic, payload }) {
  return kind === "message" ? MESSAGE_BYTES + 2 * topic.length + payload.length : 0;
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
