// The rules by which a gradient moves the weights where the step's own SGD does not: Nesterov, Adam, AdamW, clipping. The formulas
// are those of edge_client/training/optimiser.py; numbers are computed in double precision and kept in the program's.

const NORM_FLOOR = 1e-6; // torch's, in clip_grad_norm_

/** One local update's optimiser; its sums begin at zero. Call `move` once per step. */
export class Rule {
  constructor(optimiser, lr) {
    Object.assign(this, { optimiser, lr, t: 0 });
  }

  /** Move w by the gradient g, typed arrays of one length; both are overwritten. */
  move(w, g) {
    const { name, clip_norm: clip, weight_decay: decay } = this.optimiser;
    this.t += 1;
    this.sums ??= new g.constructor(g.length);
    if (clip) shorten(g, clip);
    if (decay && name === "adamw") {
      for (let i = 0; i < w.length; i += 1) w[i] *= 1 - this.lr * decay;
    } else if (decay) {
      for (let i = 0; i < w.length; i += 1) g[i] += decay * w[i];
    }
    if (name === "sgd") this.sgd(w, g);
    else this.adam(w, g);
  }

  sgd(w, g) {
    const { sums, lr } = this;
    const { momentum, nesterov } = this.optimiser;
    for (let i = 0; i < w.length; i += 1) {
      sums[i] = momentum * sums[i] + g[i];
      w[i] -= lr * (nesterov ? g[i] + momentum * sums[i] : sums[i]);
    }
  }

  adam(w, g) {
    const { sums, lr, t } = this;
    const { beta1, beta2, eps } = this.optimiser;
    this.squares ??= new g.constructor(g.length);
    const { squares } = this;
    const root = Math.sqrt((1 - beta2 ** t) / (1 - beta2));
    const [scale, floor] = [(lr * root * (1 - beta1)) / (1 - beta1 ** t), root * eps];
    for (let i = 0; i < w.length; i += 1) {
      sums[i] = beta1 * sums[i] + g[i];
      squares[i] = beta2 * squares[i] + g[i] * g[i];
      w[i] -= (scale * sums[i]) / (Math.sqrt(squares[i]) + floor);
    }
  }
}

/** As torch.nn.utils.clip_grad_norm_ does. */
function shorten(g, limit) {
  const factor = limit / (Math.sqrt(g.reduce((sum, value) => sum + value * value, 0)) + NORM_FLOOR);
  if (factor < 1) for (let i = 0; i < g.length; i += 1) g[i] *= factor;
}
