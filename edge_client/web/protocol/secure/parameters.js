// The threshold of a sum by the bounds of PROTOCOL.md, section 21, in whole numbers.

function comb(n, k) {
  let ways = 1n;
  for (let i = 0; i < k; i += 1) ways = (ways * BigInt(n - i)) / BigInt(i + 1);
  return k > n ? 0n : ways;
}

/** The ways (of comb(total, drawn)) in which at least x of `drawn` are marked, for x = 0 to drawn + 1. */
function tails(total, marked, drawn) {
  const tail = new Array(drawn + 2).fill(0n);
  for (let x = drawn; x >= 0; x -= 1) tail[x] = tail[x + 1] + comb(marked, x) * comb(total - marked, drawn - x);
  return tail;
}

/** The one t of n = `devices` with k = `neighbours` each: the greatest that keeps the bounds, up to k / 2 + 1; 0 without one. */
export function thresholdOf(devices, neighbours) {
  const [n, k, all] = [BigInt(devices), neighbours, comb(devices - 1, neighbours)];
  const missing = Math.floor((devices * 30) / 100);
  const colluding = Math.max(1, Math.floor((devices * 10) / 100));
  const gone = tails(devices - 1, missing + colluding, k)[k];
  if (k < devices - 1 && n * (n - 1n) * gone * 2n ** 40n > 2n * all) return 0;
  const [lost, held] = [tails(devices - 1, missing, k), tails(devices - 1, colluding, k)];
  let t = Math.floor(k / 2) + 1;
  while (t >= 2 && n * lost[k - t + 1] * 2n ** 20n > all) t -= 1;
  return t >= 2 && n * held[t] * 2n ** 40n <= all ? t : 0;
}
