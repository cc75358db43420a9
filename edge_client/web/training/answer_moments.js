// What a device tells of the answers of a model (PROTOCOL.md, section 12): their mean entropy, and the sums of the scores of
// its training and held-out samples, by the class that the model names.

import { Malformed } from "../protocol/errors.js";

const MAX_CLASSES = 32;

/** Of each model [M][1 + 2 d]; `logits` are M arrays [n * classes] of the samples that the probe evaluates. */
export async function answerLooks(learner, models, local, logits, batch, between) {
  const { classes, loss } = learner.program;
  if (loss !== "cross-entropy" || classes > MAX_CLASSES) {
    throw new Malformed("bad_task", `answers are asked of a classifier of at most ${MAX_CLASSES} classes`);
  }
  const looked = [];
  for (const data of [local.train, local.test]) {
    looked.push(data?.n ? (await learner.evaluate(models, data, batch, between)).logits : models.map(() => new Float64Array(0)));
  }
  const [train, test] = looked;
  return logits.map((rows, m) => [meanEntropy(rows, classes), ...answerMoments(train[m], classes), ...answerMoments(test[m], classes)]);
}

/** Scores [n * C] -> [C + C^2 + C (C + 1) / 2]: samples and sums of scores by named class, the upper triangle of the products. */
export function answerMoments(logits, classes) {
  const counts = new Float64Array(classes);
  const first = new Float64Array(classes * classes);
  const second = new Float64Array((classes * (classes + 1)) / 2);
  for (let at = 0; at < logits.length; at += classes) {
    const scores = logits.subarray(at, at + classes);
    const named = scores.indexOf(Math.max(...scores));
    counts[named] += 1;
    let place = 0;
    scores.forEach((value, j) => {
      first[named * classes + j] += value;
      for (let k = j; k < classes; k += 1, place += 1) second[place] += value * scores[k];
    });
  }
  return [...counts, ...first, ...second];
}

function meanEntropy(logits, classes) {
  let sum = 0;
  for (let at = 0; at < logits.length; at += classes) {
    const scores = logits.subarray(at, at + classes);
    const top = Math.max(...scores);
    const all = Math.log(scores.reduce((total, value) => total + Math.exp(value - top), 0)) + top;
    sum -= scores.reduce((total, value) => total + Math.exp(value - all) * (value - all), 0);
  }
  return sum / (logits.length / classes);
}
