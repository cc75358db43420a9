// Which of several models has the least loss (PROTOCOL.md, section 8, `least`).

/**
 * Losses [M][n], none negative; 0 for the samples that a model was not evaluated on. The model whose sum is the least so far goes on, by
 * `step` samples, until it has all n. `evaluate(m, index)` -> the losses of model m on the samples of these numbers.
 */
export async function leastLosses(evaluate, models, n, step) {
  const losses = Array.from({ length: models }, () => new Float64Array(n));
  const [sums, seen] = [new Float64Array(models), new Uint32Array(models)];
  for (;;) {
    const least = sums.reduce((a, b) => Math.min(a, b));
    const m = sums.findIndex((sum, k) => sum === least && seen[k] < n);
    if (m < 0) return losses;
    const stop = Math.min(seen[m] + step, n);
    const found = await evaluate(m, Uint32Array.from({ length: stop - seen[m] }, (_, i) => seen[m] + i));
    losses[m].set(found, seen[m]);
    seen[m] = stop;
    sums[m] = losses[m].reduce((sum, loss) => sum + (Number.isNaN(loss) ? Infinity : loss), 0);
  }
}
