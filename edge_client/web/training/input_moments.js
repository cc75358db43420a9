// Sums of a device's inputs that tell what a fleet's inputs look like (PROTOCOL.md, section 12): of the features of each
// sample, and of the products of every two of them. Features: arcsinh of the values, folded to 64 where there are more, and
// the lag-1 autocorrelation along each axis.

import { sizeOf } from "../protocol/tensors.js";

const MAX_VALUES = 64;
const MAX_AXES = 4;
const MIN_AXIS = 3;
const MIN_VARIANCE = 1e-9;

/** Data sets of samples of `shape`, each {n, x} -> [1 + d + d (d + 1) / 2]: n, the first sums, the upper triangle of the second. */
export function inputMoments(parts, shape) {
  const size = sizeOf(shape);
  let n = 0;
  let first = null;
  let second = null;
  for (const part of parts) {
    for (let i = 0; i < part.n; i += 1) {
      const features = inputFeatures(part.x.subarray(i * size, (i + 1) * size), shape);
      first ??= new Float64Array(features.length);
      second ??= new Float64Array((features.length * (features.length + 1)) / 2);
      let at = 0;
      features.forEach((value, j) => {
        first[j] += value;
        for (let k = j; k < features.length; k += 1, at += 1) second[at] += value * features[k];
      });
      n += 1;
    }
  }
  return [n, ...first, ...second];
}

/** The features [d] of one sample. */
export function inputFeatures(x, shape) {
  const values = Float64Array.from(x, Math.asinh);
  return [...folded(values), ...autocorrelations(values, shape)];
}

function folded(values) {
  if (values.length <= MAX_VALUES) return values;
  const found = new Float64Array(MAX_VALUES);
  values.forEach((value, i) => {
    const mixed = hash(i);
    found[(mixed >>> 1) % MAX_VALUES] += mixed & 1 ? value : -value;
  });
  return found;
}

function hash(i) {
  let mixed = (Math.imul(i, 0x9e3779b1) + 12345) >>> 0;
  mixed = Math.imul(mixed ^ (mixed >>> 15), 0x85ebca77) >>> 0;
  return (mixed ^ (mixed >>> 13)) >>> 0;
}

function autocorrelations(values, shape) {
  const mean = values.reduce((a, b) => a + b, 0) / values.length;
  const around = values.map((value) => value - mean);
  const variance = around.reduce((sum, value) => sum + value * value, 0) / values.length + MIN_VARIANCE;
  const found = [];
  let stride = values.length;
  for (const length of shape.slice(0, MAX_AXES)) {
    stride /= length;
    if (length < MIN_AXIS) continue;
    let sum = 0;
    for (let i = 0; i < values.length; i += 1) {
      if (Math.floor(i / stride) % length < length - 1) sum += around[i] * around[i + stride];
    }
    found.push(sum / ((values.length / length) * (length - 1)) / variance);
  }
  return found;
}
