// The task that a device works on: fetch what it needs, run it, and store its result. task_runner.js computes, sum_stages.js answers the
// stages of a masked sum. A result is on the disk before it is announced, so a tab that closes at any line repeats at most the training.

import { refusedRuntimeError } from "../engines/golden_run.js";
import { manifestOf } from "../protocol/blocks.js";
import { Malformed } from "../protocol/errors.js";
import { containerFunctions, initSlots, taskManifests, withoutUnneededInits } from "../protocol/task.js";
import { yieldToPage } from "./inbox.js";
import { NoRoom } from "./store.js";
import { answerStage, answerWork } from "./sum_stages.js";
import { firstSamples } from "../training/fit_probe.js";
import { ENGINE, evictBlobs } from "./task_runner.js";
import { nackFields } from "./train_conditions.js";

/** The task is not wanted any more. */
export class TaskDropped extends Error {}

/** A valid task message and what carries it out; `client` takes the events that come in the meantime. */
export class ActiveTask {
  constructor(client, key, message, until) {
    Object.assign(this, { client, key, message, until });
  }

  /** Fetch in the order of trust: the signed program, what it vouches for, the vectors; then train. -> {outcome, seconds} */
  async execute() {
    const { client, message, key } = this;
    const { taskRunner, state } = client;
    if (client.paused) throw new Malformed("unavailable", "paused by its owner");
    client.tell({ what: "task", job: message.work?.job ?? message.job, round: key.round, run: key.run });
    await taskRunner.checkSignature(message.program);
    await this.fetch([message.program]);
    const program = await taskRunner.program(message.program);
    if (message.job === "sum" && !message.work) {
      const orders = taskManifests(message);
      await taskRunner.checkSignature(...orders);
      await this.fetch(orders);
      return { outcome: { schema: program.schema, ...(await answerStage(this, state.sums, await this.order())) }, seconds: 0 };
    }
    const functions = containerFunctions(message);
    for (const [field, name] of Object.entries(functions)) taskRunner.checkContainer(program, name, message[field]);
    const own = await state.ownModels(key.run, program.schema);
    const asked = withoutUnneededInits(message, new Set(initSlots(message).filter((slot) => own.has(slot))));
    const vectors = taskManifests(asked);
    await taskRunner.checkSignature(...vectors); // a crafted model could make its update give away the samples
    const { block } = message.program;
    const containers = [...Object.keys(functions).map((field) => message[field]), ...taskRunner.frozen(program, block)];
    await evictBlobs(client, [message.program, ...containers, ...vectors], program);
    await this.requireGolden(program);
    await this.fetch([...containers, ...vectors]);
    const began = client.now();
    const local = firstSamples(await client.local(program), await state.sizes(key));
    const given = { local, own, between: (k, steps, losses) => this.poll(k, steps, losses) };
    const outcome = message.job === "sum" ? await this.summed(asked, given) : await taskRunner.run(asked, {
      ...given,
      residual: await state.residual(key, message.center, program.schema),
      posterior: await state.posterior(key),
    });
    const sizes = { train: local.train.n, test: local.test.n };
    return { outcome: { ...outcome, sizes }, seconds: (client.now() - began) / 1000 };
  }

  /** The answer to a stage of a sum that computes. */
  async summed(asked, { local, own, between }) {
    const { client: { taskRunner, state }, key } = this;
    const memory = { trained: await state.trained(key, asked.work.slot), choice: await state.choice(key), own };
    const { schema, ...found } = await taskRunner.addWords(asked, { local, memory, between });
    return { schema, own: found.own, ...(await answerWork(this, state.sums, await this.order(), found)) };
  }

  /** The fetched message of the coordinator in this stage, if it has one. */
  async order() {
    const { message } = this.message;
    return message && this.client.blobs.read(message.sha256);
  }

  /** No task with a runtime that fails the program's golden run. */
  async requireGolden(program) {
    const { client, message: { program: manifest } } = this;
    const golden = program.golden[ENGINE];
    const step = { ...program.containers[ENGINE]?.step, block: manifest.block, kind: "container" };
    if (golden) await this.fetch([step, ...client.taskRunner.frozen(program, manifest.block)]);
    const off = await client.taskRunner.goldenDifference(manifest, client.store);
    const { runtime } = client.taskRunner;
    const refused = golden && off > golden.tolerance ? [{ engine: ENGINE, runtime, difference: off }] : [];
    const changed = refused.length !== client.refused.length;
    client.refused = refused;
    if (changed) await client.announcePresence();
    if (refused.length) throw refusedRuntimeError(runtime, off, golden);
  }

  fetch(manifests) {
    return this.client.fetch(manifests, () => this.checkWanted());
  }

  /** Between two steps: let the page breathe, take in what came, and stay here while it is paused. */
  async poll(k, steps, losses) {
    const { client } = this;
    if (k !== undefined) client.tell({ what: "training", step: k, steps, loss: losses.at(-1), round: this.key.round });
    await yieldToPage();
    do {
      const waits = client.paused && !client.stopping;
      for (let event = await client.inbox.next(waits ? 1000 : 0); event !== undefined; event = await client.inbox.next(0)) await client.handle(event);
      this.checkWanted();
    } while (client.paused);
  }

  checkWanted() {
    if (this.client.task !== this || this.client.stopping) throw new TaskDropped();
    if (this.client.now() >= this.until) throw new Malformed("deadline", "the time was over before the task was done");
  }

  /** Store the result durably before it is announced. */
  async store(outcome, seconds) {
    const { client, key, message } = this;
    const update = await manifestOf(outcome.data, outcome.what, { block: client.block, inline: true });
    const { n, what, metrics } = outcome;
    await client.state.storeResult({ key, epoch: message.epoch, n, what, update, seconds, metrics }, outcome, message.center);
    const job = outcome.own ? "fit" : message.job;
    client.tell({ what: "done", job, round: key.round, loss: metrics.loss, size: update.size });
  }

  refuse(wrong) {
    const { client, key, message } = this;
    const { code, detail, retry } = nackFields(wrong);
    console.warn(`cannot do the task: ${code}: ${detail}`);
    client.sender.send("nack", { re: message.id, ...key, code, detail, retry_ms: retry });
    client.tell(wrong instanceof NoRoom ? { what: "full", round: key.round } : { what: "refused", code, detail });
  }
}
