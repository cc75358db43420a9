// The answer to a stage of a masked sum (PROTOCOL.md, section 21), and what the device keeps with it: `progress` is {sums, choice, trained}.
// state.js writes both in one transaction, before the answer is announced; so a stage that is asked again has the same answer.

import { Malformed } from "../protocol/errors.js";
import * as stages from "../protocol/secure/device_stages.js";
import { SOFT } from "../protocol/summed_task.js";

const KEPT = Uint8Array.of(0); // the answer to a fit of which nothing is told
const CHOICE = "choose"; // the part that may be told in the clear, of one center; weights in several are not

const masked = (data, progress) => ({ what: "masked", data, n: 1, metrics: {}, progress });

/** The answer to a stage that trains nothing; `order` are the bytes of the coordinator's message. */
export async function answerStage({ message: { stage, after }, key }, sums, order) {
  const answers = {
    prekeys: () => stages.offer(sums, stages.freshRoots(), after),
    shares: () => stages.deal(sums, order, key),
    show: () => stages.show(sums, order, key),
  };
  const { state, out } = await answers[stage]();
  return masked(out, { sums: state });
}

/** The answer to a stage that computes: masked words, a choice that is told, or nothing. `found` is what TaskRunner.addWords gave. */
export async function answerWork({ message: { stage, work }, key }, sums, order, { words, scale, choice, trained }) {
  const kept = { choice, trained: trained && [work.slot ?? "main", trained] };
  if (stage === "add" && words) {
    const { state, out } = await stages.mask(sums, order, key, scale, words);
    return masked(out, { ...kept, sums: state });
  }
  if (stage === "tell" && work.sum?.part === CHOICE && !SOFT.includes(work.sum.choose)) return masked(new Uint8Array(words.buffer), { ...kept, sums });
  if (stage === "keep") return masked(KEPT, { ...kept, sums });
  throw new Malformed("bad_task", `stage ${stage} tells nothing of this work`);
}
