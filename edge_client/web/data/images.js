// From a canvas: a pad to draw on, photos as samples, samples as little pictures. The only file that draws pixels.

import { fromInk, fromPixels } from "./samples.js";

const SIDE = 256; // of the pad's raster, whatever its size on the screen
const PEN = 20;
const STEP = 8; // of an arrow key
const KEYS = { ArrowLeft: [-STEP, 0], ArrowRight: [STEP, 0], ArrowUp: [0, -STEP], ArrowDown: [0, STEP] };

/** Whether a key is the browser's or the system's, as Alt and an arrow key, which go back in the history. */
export function isShortcut({ altKey, ctrlKey, metaKey }) {
  return altKey || ctrlKey || metaKey;
}

/** Input shapes that can be drawn or photographed: [1 or 3, height, width]. */
export function isPicture(input) {
  return input.length === 3 && [1, 3].includes(input[0]);
}

/** A square to draw on with finger, pen, mouse or keys; `<i>` beside the canvas shows where the keys' pen is. */
export class Pad {
  constructor(canvas, changed = () => {}) {
    canvas.width = SIDE;
    canvas.height = SIDE;
    this.canvas = canvas;
    this.mark = canvas.parentElement.querySelector("i");
    this.changed = changed;
    this.held = false; // while what was drawn is stored: a stroke would belong to no drawing
    this.pen = canvas.getContext("2d", { willReadFrequently: true });
    this.clear();
    this.place(SIDE / 2, SIDE / 2);
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    canvas.addEventListener("blur", () => this.down && this.lift());
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [((event.clientX - box.left) / box.width) * SIDE, ((event.clientY - box.top) / box.height) * SIDE];
    };
    canvas.addEventListener("pointerdown", (event) => {
      if (this.held || (this.last && !event.isPrimary)) return; // a second finger, or the palm
      this.finger = event.pointerId;
      canvas.setPointerCapture(event.pointerId);
      this.line(place(event), place(event));
      this.last = place(event);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.last || event.pointerId !== this.finger) return;
      this.line(this.last, place(event));
      this.last = place(event);
    });
    for (const end of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(end, (event) => {
        if (event.pointerId !== this.finger) return;
        if (this.last) this.changed();
        this.last = null;
      });
    }
  }

  /** The arrow keys move the pen, space sets it down or lifts it. */
  onKey(event) {
    const step = KEYS[event.key];
    if (this.held || isShortcut(event) || (!step && event.key !== " ")) return;
    event.preventDefault(); // the page does not scroll
    if (!step && event.repeat) return; // space is held down
    if (step) {
      const from = this.at;
      this.place(...from.map((value, i) => Math.min(SIDE, Math.max(0, value + step[i]))));
      if (this.down) this.line(from, this.at);
    } else if (this.down) {
      this.lift();
    } else {
      this.down = this.mark.classList.toggle("down", true);
      this.line(this.at, this.at);
    }
  }

  place(x, y) {
    this.at = [x, y];
    Object.assign(this.mark.style, { left: `${(100 * x) / SIDE}%`, top: `${(100 * y) / SIDE}%` });
  }

  lift() {
    this.down = this.mark.classList.toggle("down", false);
    this.changed();
  }

  /** A stroke, in the raster's own coordinates. */
  line(from, to) {
    const { pen } = this;
    delete this.canvas.dataset.blank;
    pen.strokeStyle = "#fff";
    pen.lineWidth = PEN;
    pen.lineCap = "round";
    pen.beginPath();
    pen.moveTo(...from);
    pen.lineTo(to[0] + 0.01, to[1]);
    pen.stroke();
  }

  clear() {
    this.pen.fillStyle = "#000";
    this.pen.fillRect(0, 0, SIDE, SIDE);
    this.canvas.dataset.blank = ""; // the page says "draw here" on a blank pad
    this.last = null;
    this.down = this.mark.classList.toggle("down", false);
  }

  /** Store what was drawn by `store(cleared)`, which calls `cleared` when it is stored; a drawing that is not stored stays. */
  async keep(store) {
    if (this.held) return; // pressed twice
    this.held = true;
    let cleared = false;
    try {
      await store(() => {
        cleared = true;
        this.clear();
        this.held = false;
      });
    } finally {
      if (!cleared) this.held = false; // else the next drawing may be held by now
    }
  }

  /** What was drawn as a sample's numbers, or null for a blank pad. */
  read([channels, height, width]) {
    const { data } = this.pen.getImageData(0, 0, SIDE, SIDE);
    const ink = Float32Array.from({ length: SIDE * SIDE }, (_, i) => data[4 * i] / 255);
    const plane = fromInk(ink, SIDE, [height, width]);
    if (plane === null || channels === 1) return plane;
    return Float32Array.from({ length: channels * plane.length }, (_, i) => plane[i % plane.length]);
  }
}

/** A photo -> a sample's numbers: the middle square, upright, scaled down, transparent on white. RangeError names a file that is none. */
export async function fromPhoto(file, input, { invert }) {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new RangeError(`${file.name} is no picture that this browser reads; JPEG and PNG are. No photo was added`);
  });
  const [, height, width] = input;
  const canvas = new OffscreenCanvas(width, height);
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const side = Math.min(bitmap.width / width, bitmap.height / height);
  const [w, h] = [side * width, side * height];
  pen.imageSmoothingQuality = "high";
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, width, height);
  pen.drawImage(bitmap, (bitmap.width - w) / 2, (bitmap.height - h) / 2, w, h, 0, 0, width, height);
  bitmap.close();
  return fromPixels(pen.getImageData(0, 0, width, height).data, input, { invert });
}

/** A little picture of a sample. */
export function thumbnail(x, [channels, height, width]) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const pen = canvas.getContext("2d");
  const image = pen.createImageData(width, height);
  const size = height * width;
  for (let i = 0; i < size; i += 1) {
    for (let c = 0; c < 3; c += 1) image.data[4 * i + c] = 255 * Math.min(1, Math.max(0, x[(channels === 3 ? c : 0) * size + i]));
    image.data[4 * i + 3] = 255;
  }
  pen.putImageData(image, 0, 0);
  return canvas;
}
