// numpy's Generator(PCG64(seed)) as far as a device needs it: permutations, uniform numbers, lots, spawned streams.
// PCG64: O'Neill 2014, "PCG: A Family of Simple Fast Space-Efficient Statistically Good Algorithms", XSL-RR 128/64. Seeding
// and bounded integers are those of numpy's SeedSequence and random_interval.

const MASK64 = (1n << 64n) - 1n;
const MASK128 = (1n << 128n) - 1n;
const MULTIPLIER = 0x2360ed051fc65da44385df649fccf645n;
const POOL = 4;

/** A stream: `seed` is an integer from 0 to 2^53 - 1, `spawn` its spawn key, if it has one. */
export class Pcg64 {
  constructor(seed, ...spawn) {
    const [a, b, c, d] = seedState(seed, spawn);
    this.increment = ((((c << 64n) | d) << 1n) | 1n) & MASK128;
    this.state = 0n;
    this.advance();
    this.state = (this.state + ((a << 64n) | b)) & MASK128;
    this.advance();
    this.spare = null; // the upper half of a 64-bit output, used next
  }

  advance() {
    this.state = (this.state * MULTIPLIER + this.increment) & MASK128;
  }

  next32() {
    if (this.spare !== null) {
      const kept = this.spare;
      this.spare = null;
      return kept;
    }
    const word = this.next64();
    this.spare = Number(word >> 32n);
    return Number(word & 0xffffffffn);
  }

  next64() {
    this.advance();
    const folded = (this.state >> 64n) ^ (this.state & MASK64);
    const turn = this.state >> 122n;
    return ((folded >> turn) | (folded << (64n - turn))) & MASK64;
  }

  /** Uniform integer from 0 to `top`, below 2^32: draws masked to as many bits as `top` has, until one fits. */
  below(top) {
    if (top === 0) return 0;
    const mask = 0xffffffff >>> Math.clz32(top);
    for (;;) {
      const drawn = (this.next32() & mask) >>> 0;
      if (drawn <= top) return drawn;
    }
  }

  /** numpy's `permutation(n)`: Fisher and Yates from the end. */
  permutation(n) {
    const order = Uint32Array.from({ length: n }, (_, i) => i);
    for (let i = n - 1; i > 0; i -= 1) {
      const j = this.below(i);
      [order[i], order[j]] = [order[j], order[i]];
    }
    return order;
  }

  /** numpy's `integers(n, size=count)`, n up to 2^21: Lemire's products of 32-bit draws. */
  integers(n, count) {
    const unfair = (2 ** 32 - n) % n; // the rest of so many products are drawn again
    const one = () => {
      for (;;) {
        const product = this.next32() * n;
        if (product % 2 ** 32 >= unfair) return Math.floor(product / 2 ** 32);
      }
    };
    return Array.from({ length: count }, () => (n === 1 ? 0 : one()));
  }

  /** `count` uniform numbers in [0, 1): the upper 53 bits of 64-bit draws. */
  doubles(count) {
    return Float64Array.from({ length: count }, () => Number(this.next64() >> 11n) * 2 ** -53);
  }

  /** `count` uniform float32 numbers in [0, 1): the upper 24 bits of 32-bit draws. */
  floats(count) {
    return Float32Array.from({ length: count }, () => (this.next32() >>> 8) * 2 ** -24);
  }
}

/** SeedSequence(seed, spawn_key=spawn).generate_state(4, uint64). */
function seedState(seed, spawn) {
  const entropy = words(seed);
  const keys = spawn.flatMap(words);
  while (keys.length && entropy.length < POOL) entropy.push(0);
  const pool = mixEntropy([...entropy, ...keys]);
  let constant = 0x8b51f9dd;
  const out = Array.from({ length: 2 * POOL }, (_, i) => {
    let value = (pool[i % POOL] ^ constant) >>> 0;
    constant = Math.imul(constant, 0x58f38ded) >>> 0;
    value = Math.imul(value, constant) >>> 0;
    return (value ^ (value >>> 16)) >>> 0;
  });
  return Array.from({ length: POOL }, (_, i) => BigInt(out[2 * i]) | (BigInt(out[2 * i + 1]) << 32n));
}

function mixEntropy(entropy) {
  let constant = 0x43b0d7e5;
  const hash = (given) => {
    let value = (given ^ constant) >>> 0;
    constant = Math.imul(constant, 0x931e8875) >>> 0;
    value = Math.imul(value, constant) >>> 0;
    return (value ^ (value >>> 16)) >>> 0;
  };
  const mix = (x, y) => {
    const value = (Math.imul(0xca01f9dd, x) - Math.imul(0x4973f715, y)) >>> 0;
    return (value ^ (value >>> 16)) >>> 0;
  };
  const pool = Array.from({ length: POOL }, (_, i) => hash(entropy[i] ?? 0));
  for (let from = 0; from < POOL; from += 1) {
    for (let to = 0; to < POOL; to += 1) if (from !== to) pool[to] = mix(pool[to], hash(pool[from]));
  }
  for (const word of entropy.slice(POOL)) for (let to = 0; to < POOL; to += 1) pool[to] = mix(pool[to], hash(word));
  return pool;
}

function words(value) {
  const high = Math.floor(value / 2 ** 32);
  return high ? [value % 2 ** 32, high] : [value];
}
