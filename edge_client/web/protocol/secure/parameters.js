// Whether a threshold keeps the bounds of PROTOCOL.md, section 21, in whole numbers.

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

/** Whether t = `threshold` of k = `neighbours` shares is possible for n = `devices`. */
export function isPossibleThreshold(devices, neighbours, threshold) {
  const [n, k, all] = [BigInt(devices), neighbours, comb(devices - 1, neighbours)];
  const missing = Math.floor((devices * 30) / 100);
  const colluding = Math.max(1, Math.floor((devices * 10) / 100));
  const gone = tails(devices - 1, missing + colluding, k)[k];
  if (k < devices - 1 && n * (n - 1n) * gone * 2n ** 40n > 2n * all) return false;
  const lost = tails(devices - 1, missing, k)[k - threshold + 1];
  const held = tails(devices - 1, colluding, k)[threshold];
  return threshold >= 2 && threshold <= k && n * lost * 2n ** 20n <= all && n * held * 2n ** 40n <= all;
}
