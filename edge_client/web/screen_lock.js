// Keeps the screen on while there is work: a phone that sleeps stops the page. A phone that cannot deliver may sleep.

/** `request()` lends a lock of the screen, or nothing; `show(on)` tells the person; `page` says when it is in front again. */
export class ScreenLock {
  constructor({ page, request, show }) {
    Object.assign(this, { page, request, show });
    this.lock = null;
    this.wanted = false;
    this.settled = Promise.resolve(); // one change after the other: a lock that is asked for twice is given back once
    page.addEventListener("visibilitychange", () => this.renew());
  }

  /** What happens in the client. */
  on({ what, owes, works }) {
    if (["task", "delivering"].includes(what) || (what === "resumed" && works)) this.wanted = true;
    else if (["answered", "refused", "full", "paused", "ended"].includes(what) || (what === "rest" && !owes) || (what === "lost" && !works)) this.wanted = false;
    else return;
    this.renew();
  }

  renew() {
    this.settled = this.settled.then(() => this.settle());
  }

  async settle() {
    try {
      if (this.wanted && this.lock === null && this.page.visibilityState === "visible") {
        const lock = (await this.request()) ?? null;
        this.lock = lock;
        lock?.addEventListener("release", () => {
          if (this.lock === lock) this.lock = null;
          this.show(this.lock !== null);
        });
      } else if (!this.wanted && this.lock !== null) {
        await this.lock.release();
      }
    } catch {
      this.lock = null; // a phone low on power may say no
    }
    this.show(this.lock !== null);
  }
}
