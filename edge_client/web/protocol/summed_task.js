// The work of a sum: its public scale, its vectors, and what of it a device refuses. See edge_client/protocol/summed_task.py.

import { Malformed } from "./errors.js";

export const SOFT = ["shares", "posterior"]; // a device has a part in every center
export const SCORE_LEVELS = 1_000; // of an accuracy or F1
const DEVIATIONS = 12; // of the noise of a sum have room in a word

const bad = (detail) => new Malformed("bad_task", detail);

/** The public scale of a sum: `bits` of a word, at most so many `devices`, the L2 norm `clip` of one contribution, `noise` in units of it. */
export class SumScale {
  constructor({ bits, devices, clip, noise = 0 }) {
    Object.assign(this, { bits, devices, clip, noise });
    const room = devices + Math.ceil(DEVIATIONS * noise * Math.sqrt(devices));
    this.levels = Math.floor((2 ** (bits - 1) - 1) / room); // the greatest word of one device, in absolute value
    if (this.levels < 1) throw bad(`a sum of ${devices} devices overflows words of ${bits} bits`);
  }

  /** The standard deviation of the noise in a word of one device. */
  get deviation() {
    return this.noise * this.levels;
  }

  /** Values in [-1, 1] as words, rounded at random to a neighbour, so that the mean error is zero. */
  toWords(values, stream) {
    const drawn = stream.doubles(values.length);
    return this.modulo(values.map((value, i) => Math.floor(Math.min(1, Math.max(-1, value)) * this.levels + drawn[i])));
  }

  /** Whole numbers modulo 2^bits, as a Uint32Array. */
  modulo(values) {
    const size = 2 ** this.bits;
    return Uint32Array.from(values, (value) => value - Math.floor(value / size) * size);
  }
}

/** A blob of kind "points" -> Float64Array. */
export function decodePoints(data) {
  if (data.length % 8) throw new Malformed("bad_schema", `points of ${data.length} bytes`);
  const values = new Float64Array(data.slice().buffer);
  if (!values.every(Number.isFinite)) throw new Malformed("not_finite", "points are not finite");
  return values;
}

/**
 * The work of a fit that is summed, with its vectors by hash -> {work, sum, ...its fields, centers: K models, scale, points, pointsOpen}.
 * `points` are [restarts][K] centroids in the compared columns, `pointsOpen` says which of them take part.
 */
export function readSummedFit(work, vectors) {
  const { sum } = work;
  const centers = sum.centers.map(({ sha256 }) => vectors.get(sha256));
  const { share = 1, compare = [], hysteresis = 0, sigma = 0, refresh = true, repeats = 1, move = 1 } = sum;
  const task = { ...sum, sum, work, centers, scale: new SumScale(sum.scale), share, compare, hysteresis, sigma, refresh, repeats, move };
  const columns = compare.reduce((total, [start, end]) => total + end - start, 0);
  if (columns > centers[0].length) throw bad(`${columns} columns of a model of ${centers[0].length} are compared`);
  if (!sum.points) return task;
  const [k, width] = [centers.length, compared(task, centers[0]).length];
  const values = vectors.get(sum.points.sha256);
  const runs = values.length / (k * width);
  if (!Number.isInteger(runs)) throw bad(`${values.length} values for centroids of ${width} columns`);
  const rows = (one) => Array.from({ length: runs }, (_, r) => Array.from({ length: k }, (_each, m) => one(r * k + m)));
  task.points = rows((at) => values.subarray(at * width, (at + 1) * width));
  if (!sum.points_open) return task;
  if (sum.points_open.length !== runs * k) throw bad("points_open has another shape than the centroids");
  task.pointsOpen = rows((at) => Boolean(sum.points_open[at]));
  return task;
}

/** The columns of a vector by which models are compared. */
export function compared(task, vector) {
  const parts = task.compare.map(([start, end]) => vector.subarray(start, end));
  const found = new vector.constructor(parts.reduce((size, part) => size + part.length, 0));
  parts.reduce((at, part) => {
    found.set(part, at);
    return at + part.length;
  }, 0);
  return found;
}
