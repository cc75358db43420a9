// Skellam noise, the difference of two Poisson numbers, as in edge_client/training/skellam.py: a device adds it to its words before they are
// masked. The random numbers are the browser's secret ones.

const WORDS = 16_384; // getRandomValues gives at most 64 KiB
const FEW = 10; // below: by products of uniform numbers

/** Uniform numbers between 0 and 1, without the ends, that no one else knows. */
export class SecretNumbers {
  constructor() {
    this.words = new Uint32Array(WORDS);
    this.at = WORDS;
  }

  next() {
    if (this.at === WORDS) {
      crypto.getRandomValues(this.words);
      this.at = 0;
    }
    const [high, low] = [this.words[this.at++] >>> 5, this.words[this.at++] >>> 6];
    return (high * 2 ** 26 + low + 0.5) * 2 ** -53;
  }

  doubles(count) {
    return Float64Array.from({ length: count }, () => this.next());
  }
}

/** Whole numbers plus Skellam noise of this standard deviation, in units of a word: a Float64Array. */
export function withNoise(words, deviation, numbers = new SecretNumbers()) {
  const draw = poisson(deviation ** 2 / 2);
  return Float64Array.from(words, (word) => word + draw(numbers) - draw(numbers));
}

/** Draws Poisson numbers of a mean up to 2^52. Hörmann 1993, "The transformed rejection method for generating Poisson random variables", PTRS. */
function poisson(mean) {
  if (mean < FEW) return (numbers) => few(mean, numbers);
  const b = 0.931 + 2.53 * Math.sqrt(mean);
  const a = -0.059 + 0.02483 * b;
  const inverse = 1.1239 + 1.1328 / (b - 3.4);
  const sure = 0.9277 - 3.6224 / (b - 2);
  return (numbers) => {
    for (;;) {
      const u = numbers.next() - 0.5;
      const v = numbers.next();
      const us = 0.5 - Math.abs(u);
      const k = Math.floor(((2 * a) / us + b) * u + mean + 0.43);
      if (us >= 0.07 && v <= sure) return k;
      if (k < 0 || (us < 0.013 && v > us)) continue;
      if (Math.log((v * inverse) / (a / (us * us) + b)) <= logShare(k, mean)) return k;
    }
  };
}

function few(mean, numbers) {
  const end = Math.exp(-mean);
  let k = 0;
  for (let product = numbers.next(); product > end; product *= numbers.next()) k += 1;
  return k;
}

/** log(e^-mean mean^k / k!), without the difference of large terms: for large k by Stirling's series around the mean. */
function logShare(k, mean) {
  if (k < FEW) {
    let total = k * Math.log(mean) - mean;
    for (let i = 2; i <= k; i += 1) total -= Math.log(i);
    return total;
  }
  const x = (k - mean) / mean;
  const rest = 1 / (12 * k) - 1 / (360 * k ** 3) + 1 / (1260 * k ** 5);
  return -mean * ((1 + x) * Math.log1p(x) - x) - 0.5 * Math.log(2 * Math.PI * k) - rest;
}
