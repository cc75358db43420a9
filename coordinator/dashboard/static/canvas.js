// Pictures with a mark per device: map, fleet, assignment. They use a canvas, which redraws thousands smoothly.

import { centerColour, cssColour, fitCanvas, shortened, showTip } from "./dom.js";

const MOVE_MS = 900;
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

// The map of the devices' models. After `update(map)` dots slide from their last positions.
export class Map2D {
  constructor(canvas, open) {
    this.canvas = canvas;
    this.places = new Map();
    this.now = null;
    canvas.addEventListener("pointermove", (event) => {
      const id = this.at(event);
      canvas.style.cursor = id ? "pointer" : "";
      showTip(id, event.clientX, event.clientY);
    });
    canvas.addEventListener("pointerleave", () => showTip(""));
    canvas.addEventListener("click", (event) => { const id = this.at(event); if (id) { showTip(""); open(id); } });
  }

  update(map) {
    const before = this.positions();
    this.now = map;
    const start = map.devices.map((id, i) => before.devices.get(id) ?? map.xy[i]);
    const middles = map.centers.map((place, k) => before.centers[k] ?? place);
    const farthest = (axis) => [map.xy, map.centers].reduce((most, places) => places.reduce((m, place) => Math.max(m, Math.abs(place[axis])), most), 1);
    this.extent = [farthest(0), farthest(1)];
    this.from = { start, middles };
    this.began = reducedMotion.matches || !before.devices.size ? -Infinity : performance.now();
    this.frame();
  }

  clear() {
    this.now = this.spots = null;
    this.draw();
  }

  progress() { // of the slide from 0 to 1, eased
    const t = Math.min(1, (performance.now() - this.began) / MOVE_MS);
    return t < 1 ? t * t * (3 - 2 * t) : 1;
  }

  positions() { // current positions, in the units of the newest map
    if (!this.now) return { devices: new Map(), centers: [] };
    const t = this.progress();
    const mix = (a, b) => [a[0] + (b[0] - a[0]) * t, a[1] + (b[1] - a[1]) * t];
    return {
      devices: new Map(this.now.devices.map((id, i) => [id, mix(this.from.start[i], this.now.xy[i])])),
      centers: this.now.centers.map((place, k) => mix(this.from.middles[k], place)),
    };
  }

  frame() {
    if (this.waits || !this.now) return;
    this.waits = requestAnimationFrame(() => {
      this.waits = 0;
      this.draw();
      if (this.progress() < 1) this.frame();
    });
  }

  draw() {
    const { context, width, height } = fitCanvas(this.canvas);
    if (!this.now || !width) return;
    const t = this.progress(), { xy, assigned, centers } = this.now, { start, middles } = this.from;
    const wanted = Math.min((width / 2 - 34) / this.extent[0], (height / 2 - 30) / this.extent[1]);
    this.unit = this.unit ? this.unit + (wanted - this.unit) * (t < 1 ? 0.12 : 1) : wanted;
    const k1 = this.unit; // one scale for both axes, so that distances are true
    const cx = width / 2, cy = height / 2, n = xy.length;
    const radius = n > 2000 ? 1.6 : n > 400 ? 2.6 : n > 60 ? 4 : 6;
    const spots = (this.spots = new Float32Array(2 * n));
    const groups = new Map();
    for (let i = 0; i < n; i += 1) {
      const x = spots[2 * i] = cx + (start[i][0] + (xy[i][0] - start[i][0]) * t) * k1;
      const y = spots[2 * i + 1] = cy - (start[i][1] + (xy[i][1] - start[i][1]) * t) * k1;
      let path = groups.get(assigned[i]);
      if (!path) groups.set(assigned[i], path = new Path2D());
      if (n > 1000) { path.rect(x - radius, y - radius, 2 * radius, 2 * radius); continue; } // squares draw faster, and look the same at this size
      path.moveTo(x + radius, y);
      path.arc(x, y, radius, 0, 6.2832);
    }
    context.globalAlpha = n > 400 ? 0.75 : 0.9;
    for (const [k, path] of groups) {
      context.fillStyle = cssColour(centerColour(k));
      context.fill(path);
    }
    context.globalAlpha = 1;
    context.font = "700 12px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    centers.forEach((place, k) => { // a ring and a number beside it leave the dots visible
      const x = cx + (middles[k][0] + (place[0] - middles[k][0]) * t) * k1;
      const y = cy - (middles[k][1] + (place[1] - middles[k][1]) * t) * k1;
      context.lineWidth = 2;
      context.strokeStyle = cssColour(centerColour(k));
      context.beginPath();
      context.arc(x, y, 14, 0, 6.2832);
      context.stroke();
      context.beginPath();
      context.roundRect(x + 12, y - 24, 20, 18, 6);
      context.fillStyle = cssColour("var(--card)");
      context.fill();
      context.stroke();
      context.fillStyle = cssColour("var(--ink)");
      context.fillText(String(k), x + 22, y - 14.5);
    });
  }

  at(event) { // the nearest device within 9 pixels
    if (!this.spots) return "";
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    let best = 81, found = "";
    for (let i = 0; i < this.now.devices.length; i += 1) {
      const d = (this.spots[2 * i] - x) ** 2 + (this.spots[2 * i + 1] - y) ** 2;
      if (d < best) { best = d; found = this.now.devices[i]; }
    }
    return found;
  }
}

const ABSENT = ["away", "sleeping"], TROUBLED = ["late", "rejected"];

// One square per device of a large fleet, coloured by its center: pale when the device is absent, framed when it is late or
// rejected.
export class Fleet {
  constructor(canvas, open) {
    this.canvas = canvas;
    const at = (event) => {
      if (!this.ids) return -1;
      const box = canvas.getBoundingClientRect();
      const column = Math.floor((event.clientX - box.left) / this.step), row = Math.floor((event.clientY - box.top) / this.step);
      return column >= 0 && column < this.columns ? this.order[row * this.columns + column] ?? -1 : -1;
    };
    canvas.addEventListener("pointermove", (event) => {
      const i = at(event);
      canvas.style.cursor = i >= 0 ? "pointer" : "";
      showTip(i >= 0 ? this.words(i) : "", event.clientX, event.clientY);
    });
    canvas.addEventListener("pointerleave", () => showTip(""));
    canvas.addEventListener("click", (event) => { const i = at(event); if (i >= 0) { showTip(""); open(this.ids[i]); } });
  }

  draw({ ids, state: codes }, order, states, centerOf, words) {
    const { context, width, height } = fitCanvas(this.canvas);
    const n = ids.length;
    Object.assign(this, { ids, order, words });
    if (!n || !width) return;
    let step = Math.min(46, Math.sqrt((width * height) / n));
    while (step > 2 && Math.ceil(n / Math.floor(width / step)) * step > height) step -= 0.25;
    this.step = step;
    this.columns = Math.floor(width / step);
    const gap = step > 14 ? 4 : step > 6 ? 1.5 : 0.6, side = step - gap;
    const looks = states.map((name) => ({ pale: ABSENT.includes(name), framed: TROUBLED.includes(name) }));
    const groups = new Map(); // center and pale -> path
    const frames = new Path2D();
    order.forEach((i, at) => {
      const x = (at % this.columns) * step, y = Math.floor(at / this.columns) * step;
      const { pale, framed } = looks[codes[i]], center = centerOf(i), key = 2 * center + (pale ? 1 : 0);
      let group = groups.get(key);
      if (!group) groups.set(key, group = { fill: centerColour(center), pale, path: new Path2D() });
      group.path.rect(x, y, side, side);
      if (framed) frames.rect(x + 0.5, y + 0.5, side - 1, side - 1);
    });
    for (const { fill, pale, path } of groups.values()) {
      context.globalAlpha = pale ? 0.35 : 1;
      context.fillStyle = cssColour(fill);
      context.fill(path);
    }
    context.globalAlpha = 1;
    context.lineWidth = step > 6 ? 2 : 1;
    context.strokeStyle = cssColour("var(--danger)");
    context.stroke(frames);
  }
}

// One row per device, one column per round, coloured by center.
const MARKS = "0123456789abcdefghijklmnopqrstuvwxyz";
export function drawGrid(canvas, grid, of) {
  const { context, width, height } = fitCanvas(canvas);
  if (!width || !grid.rows.length || !grid.rows[0].length) return;
  const rows = grid.rows.length, done = grid.rows[0].length;
  const columns = Math.max(done, Math.min(60, of - grid.first + 1)); // future rounds are pale
  const narrow = width < 500;
  const named = rows > 24 ? 0 : narrow ? 72 : 92, bottom = 18;
  const h = (height - bottom) / rows, w = (width - named) / columns;
  const gapX = w > 8 ? 2 : 0, gapY = h > 6 ? 2 : 0;
  const groups = new Map();
  grid.rows.forEach((row, i) => {
    for (let j = 0; j < columns; j += 1) {
      const k = j < done ? MARKS.indexOf(row[j]) : -1;
      let path = groups.get(k);
      if (!path) groups.set(k, path = new Path2D());
      path.rect(named + j * w, i * h, Math.max(0.5, w - gapX), Math.max(0.5, h - gapY));
    }
  });
  for (const [k, path] of groups) {
    context.fillStyle = k < 0 ? cssColour("var(--soft)") : cssColour(centerColour(k));
    context.fill(path);
  }
  context.fillStyle = cssColour("var(--quiet)");
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "left";
  if (named) grid.devices.forEach((id, i) => context.fillText(shortened(id, narrow ? 10 : 13), 0, i * h + (h - gapY) / 2));
  context.textAlign = "center";
  const every = Math.max(1, Math.ceil(columns / Math.max(1, Math.floor((width - named) / 46))));
  for (let j = 0; j < columns; j += every) context.fillText(String(grid.first + j), named + j * w + (w - gapX) / 2, height - 7);
}
