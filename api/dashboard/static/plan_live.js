// Asks again and again while a slider moves: one question at a time, always the newest one next.
// A question that takes long is given up for a newer one; answers that are known are given at once.
const PATIENCE_MS = 400;
const MOST_KNOWN = 400;
const POOL_MS = 10000;

// What a pool can promise, and pay, changes with the promises to others.
const isOld = ({ body, at_ms }) => Boolean(body.promise || body.start_at || body.left_usd !== undefined) && performance.now() - at_ms > POOL_MS;

export class Live {
  // `ask(question, signal)` answers; `tell(answer, question)` is called for every answer that is still wanted.
  constructor(ask, tell) {
    this.ask = ask;
    this.tell = tell;
    this.known = new Map();
    this.wanted = null;
    this.asking = null;
    this.slow = null;
    this.waiting = [];
  }

  // Resolves once every question is answered.
  settled() {
    if (!this.asking && !this.wanted) return Promise.resolve();
    return new Promise((resolve) => this.waiting.push(resolve));
  }

  want(question) {
    const answer = this.known.get(JSON.stringify(question));
    if (answer && !isOld(answer)) {
      this.wanted = null;
      this.asking?.abort();
      this.tell(answer, question);
      return;
    }
    this.wanted = question;
    if (!this.asking) this.next();
    else if (performance.now() - this.began > PATIENCE_MS) this.asking.abort();
    else this.slow ??= setTimeout(() => this.giveUp(), PATIENCE_MS);
  }

  giveUp() {
    this.slow = null;
    if (this.wanted && this.asking && performance.now() - this.began > PATIENCE_MS) this.asking.abort();
  }

  async next() {
    const question = this.wanted;
    this.wanted = null;
    const asking = new AbortController();
    this.asking = asking;
    this.began = performance.now();
    const answer = await this.ask(question, asking.signal);
    this.asking = null;
    if (!asking.signal.aborted && answer.status > 0) {
      this.remember(question, answer);
      this.tell(answer, question);
    } else if (!asking.signal.aborted) this.tell(answer, question);
    if (this.wanted) this.next();
    else this.waiting.splice(0).forEach((resolve) => resolve());
  }

  remember(question, answer) {
    if (answer.status !== 200 && answer.status !== 422) return;
    if (this.known.size >= MOST_KNOWN) this.known.delete(this.known.keys().next().value);
    this.known.set(JSON.stringify(question), { ...answer, at_ms: performance.now() });
  }
}
