// Charts of a run as SVG: lines over rounds, bars over rounds, a heat map. Each fills one node from plain numbers.
// With the pointer, or the focus and the arrow keys, a user moves along the rounds and reads the values.

import { centerColour, cssColour, el, svg } from "./dom.js";

const LEFT = 50, RIGHT = 14, TOP = 12, BOTTOM = 24, MARK_WORDS = 16, MAX_POINTS = 400;
const cursors = new WeakMap(); // the selected round, kept when the chart is redrawn

function thin(list, marked) { // the marked place stays
  if (list.length <= MAX_POINTS) return list;
  const step = (list.length - 1) / (MAX_POINTS - 1);
  const kept = new Set(Array.from({ length: MAX_POINTS }, (_, i) => Math.round(i * step)));
  return list.filter(([x], i) => kept.has(i) || x === marked);
}

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * size).find((s) => s >= raw);
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) values.push(i * step);
  return { step, values };
}

// series: [{name, colour, dashed, thick, mark: [round, words], values: [[round, y|null], ...]}]; a mark is at the highest value of all; the axis begins at `from`, or below it where a value does, and ends at `to` at the latest; `axis` words a tick's value, given the step from one to the next
export function lines(node, { series, label, format, axis = format, from = null, to = null, right = 58, empty, unit }) {
  const drawn = series.map((one) => ({ ...one, values: thin(one.values, one.mark?.[0]) }));
  const points = drawn.flatMap((one) => one.values).filter(([, y]) => y !== null && y !== undefined);
  if (!points.length) { showEmpty(node, empty); return; }
  const rounds = [...new Set(drawn.flatMap((one) => one.values.map(([x]) => x)))].sort((a, b) => a - b);
  const ys = points.map(([, y]) => y);
  let low = Math.min(...ys, from ?? Infinity), high = Math.max(...ys);
  high = Math.min(to ?? Infinity, high + (high - low) * 0.08);
  if (low !== from) low -= (high - low) * 0.05;
  if (high - low < 1e-9) { low -= Math.abs(low) * 0.1 || 0.1; high = Math.min(to ?? Infinity, high + (Math.abs(high) * 0.1 || 0.1)); }
  const frame = drawFrame(node, rounds, low, high, axis, right, series.some(({ mark }) => mark) ? TOP + MARK_WORDS : TOP);
  if (!frame) return;
  for (const one of drawn) {
    let path = "", pen = "M";
    for (const [x, y] of one.values) {
      if (y === null || y === undefined) { pen = "M"; continue; }
      path += `${pen}${frame.x(x).toFixed(1)} ${frame.y(y).toFixed(1)}`;
      pen = "L";
    }
    frame.root.append(svg("path", { d: path, class: one.thick ? "line thick" : "line", stroke: one.colour, "stroke-dasharray": one.dashed ? "5 4" : null }));
    if (one.values.length === 1 && one.values[0][1] != null) frame.root.append(svg("circle", { cx: frame.x(one.values[0][0]), cy: frame.y(one.values[0][1]), r: 3, fill: one.colour }));
  }
  endNames(frame, drawn, right);
  for (const { mark, colour, values } of drawn) if (mark) drawMark(frame, mark, values.find(([x]) => x === mark[0])?.[1], colour);
  const table = new Map(rounds.map((x) => [x, drawn.map((one) => [one, one.values.find(([r]) => r === x)?.[1]])]));
  addReadout(node, frame, rounds, label, unit, (x) => table.get(x).filter(([, y]) => y != null).map(([one, y]) => `${one.name} ${format(y)}`).join(", "));
}

function drawMark(frame, [round, words], y, colour) { // a ring at one round, with its words above, where no curve is
  if (y == null) return;
  const x = frame.x(round), left = x > frame.width / 2;
  frame.root.append(svg("circle", { class: "mark", cx: x, cy: frame.y(y), r: 6, stroke: colour }),
    svg("text", { class: "mark-words", x: x + (left ? 6 : -6), y: frame.y(y) - 12, "text-anchor": left ? "end" : "start" }, words));
}

function endNames(frame, drawn, right) { // at the right end of each line, moved apart
  const ends = drawn.map((one) => {
    const end = one.values.findLast(([, y]) => y !== null && y !== undefined);
    return end && { one, y: frame.y(end[1]) };
  }).filter(Boolean).sort((a, b) => a.y - b.y);
  if (ends.length > 10) return;
  ends.forEach((end, i) => { if (i && end.y < ends[i - 1].y + 12) end.y = ends[i - 1].y + 12; });
  const over = ends.length ? Math.max(0, ends.at(-1).y - (frame.height - BOTTOM)) : 0;
  for (const { one, y } of ends) { // in the ink of all text, which has contrast; the dot has the line's colour
    const [x, words] = [frame.width - right + 5, one.short ?? one.name];
    if (words) frame.root.append(svg("circle", { cx: x, cy: y - over, r: 3, fill: one.colour }), svg("text", { x: x + 6, y: y + 4 - over, class: "end" }, words));
  }
}

// stacks: [{name, colour, values: [[round, y], ...]}], stacked on each other
export function bars(node, { stacks, label, format, axis = format, empty, unit }) {
  const drawn = stacks.map((one) => ({ ...one, values: thin(one.values) }));
  const rounds = drawn[0].values.map(([x]) => x);
  if (!rounds.length) { showEmpty(node, empty); return; }
  const sums = rounds.map((_, i) => drawn.reduce((sum, one) => sum + one.values[i][1], 0));
  const frame = drawFrame(node, rounds, 0, Math.max(...sums) || 1, axis, RIGHT);
  if (!frame) return;
  const gap = (frame.width - LEFT - RIGHT) / Math.max(rounds.length, 4);
  const wide = Math.max(1, Math.min(34, gap * 0.72));
  const place = (i) => (rounds.length === 1 ? frame.x(rounds[0]) : LEFT + wide / 2 + ((frame.width - LEFT - RIGHT - wide) * i) / (rounds.length - 1));
  rounds.forEach((_, i) => {
    let base = 0;
    for (const one of drawn) {
      const y = one.values[i][1];
      const top = frame.y(base + y), bottom = frame.y(base);
      frame.root.append(svg("rect", { x: place(i) - wide / 2, y: top, width: wide, height: Math.max(0, bottom - top), fill: one.colour, rx: wide > 8 ? 2 : 0 }));
      base += y;
    }
  });
  const at = new Map(rounds.map((x, i) => [x, i]));
  frame.x = (x) => place(at.get(x));
  addReadout(node, frame, rounds, label, unit, (x) => drawn.map((one) => `${one.name} ${format(one.values[at.get(x)][1])}`).join(", "));
}

function showEmpty(node, words) {
  node.replaceChildren(el("p", { class: "empty" }, words));
}

function drawFrame(node, rounds, low, high, format, right, top = TOP) {
  const { width, height } = node.getBoundingClientRect();
  if (!width) return null; // its section is folded
  const first = rounds[0], span = Math.max(1, rounds.at(-1) - first);
  const x = (round) => LEFT + ((width - LEFT - right) * (round - first)) / span;
  const y = (value) => height - BOTTOM - ((height - top - BOTTOM) * (value - low)) / (high - low);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  const { step: apart, values } = ticks(low, high, 4);
  for (const value of values) {
    root.append(svg("line", { class: "axis", x1: LEFT, x2: width - right, y1: y(value), y2: y(value) }));
    root.append(svg("text", { x: LEFT - 7, y: y(value) + 4, "text-anchor": "end" }, format(value, apart)));
  }
  const step = Math.max(1, Math.ceil(rounds.length / Math.max(2, Math.floor((width - LEFT - right) / 60))));
  for (let i = 0; i < rounds.length; i += step) root.append(svg("text", { x: x(rounds[i]), y: height - 6, "text-anchor": "middle" }, String(rounds[i])));
  return { root, x, y, width, height };
}

const spot = (unit, x) => (unit === "updates" ? `${x} updates` : `${unit ?? "round"} ${x}`);

function addReadout(node, frame, rounds, label, unit, words) {
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: frame.height - BOTTOM, visibility: "hidden" });
  frame.root.append(cursor);
  const said = el("output", { class: "said" });
  const look = (round) => {
    cursors.set(node, round);
    cursor.setAttribute("visibility", round === null ? "hidden" : "visible");
    if (round !== null) { cursor.setAttribute("x1", frame.x(round)); cursor.setAttribute("x2", frame.x(round)); }
    said.textContent = round === null ? "" : `${spot(unit, round)}: ${words(round)}`;
  };
  node.replaceChildren(frame.root, said);
  node.tabIndex = 0;
  node.setAttribute("role", "group");
  node.setAttribute("aria-label", `${label}. Newest, ${spot(unit, rounds.at(-1))}: ${words(rounds.at(-1))}. Arrow keys read the others.`);
  node.onpointermove = (event) => {
    const at = event.clientX - node.getBoundingClientRect().left;
    look(rounds.reduce((best, round) => (Math.abs(frame.x(round) - at) < Math.abs(frame.x(best) - at) ? round : best)));
  };
  node.onpointerleave = node.onblur = () => look(null);
  node.onkeydown = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || event.altKey || event.ctrlKey || event.metaKey) return; // the browser's own: a page back
    event.preventDefault();
    const now = cursors.get(node) ?? null;
    const index = now === null ? rounds.length - 1 : Math.min(rounds.length - 1, Math.max(0, rounds.indexOf(now) + step));
    look(rounds[index]);
  };
  if (cursors.get(node) != null && rounds.includes(cursors.get(node))) look(cursors.get(node));
}

// Black or white, whichever has the greater contrast (WCAG 2.2), which is at least 4.5.
function inkOn(colour) {
  const [red, green, blue] = colour.map((value) => (value <= 10 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000" : "#fff";
}

// a matrix values[k][k]; the colours span its minimum to 1
export function heat(node, values, label) {
  const k = values.length, size = 44, margin = 30;
  const flat = values.flat();
  const low = Math.min(...flat, 0.999999), span = 1 - low;
  const side = margin + k * size;
  const root = svg("svg", { viewBox: `0 0 ${side} ${side}`, role: "img", "aria-label": label, css: { "max-width": `${side * 1.8}px` } });
  const [from, to] = ["var(--heat-low)", "var(--heat-high)"].map((name) => cssColour(name).split(",").map(Number));
  for (let i = 0; i < k; i += 1) {
    for (const [x, y] of [[margin + i * size + size / 2, margin / 2], [margin / 2, margin + i * size + size / 2]]) {
      root.append(svg("circle", { cx: x - 6, cy: y, r: 5, fill: centerColour(i) }), svg("text", { class: "center-words", x: x + 7, y }, String(i)));
    }
    for (let j = 0; j < k; j += 1) {
      const share = (values[i][j] - low) / span;
      const colour = from.map((a, at) => Math.round(a + (to[at] - a) * share));
      root.append(svg("rect", { x: margin + j * size + 1, y: margin + i * size + 1, width: size - 2, height: size - 2, rx: 4, fill: `rgb(${colour})` },
        svg("title", {}, `centers ${i} and ${j}: ${values[i][j].toFixed(4)}`)));
      if (k <= 10) root.append(svg("text", { class: "cell-words", "data-value": values[i][j], x: margin + j * size + size / 2, y: margin + i * size + size / 2, css: { fill: inkOn(colour) } }, values[i][j].toFixed(3)));
    }
  }
  node.replaceChildren(root);
}
