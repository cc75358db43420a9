"""FedJAX: one FedProx round of all clients per turn, MLP 784-200-10. Runs in .peers/fedjax.

    python -m tests.benches.peers.fedjax_rounds WORK.npz BACKEND      BACKEND is jit, or pmap with two host devices

FedJAX's own algorithm, batches and optimizers, with its jitted step; data in order, so that the batches are ours.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

import fedjax  # type: ignore[import-not-found]
import fedjax.algorithms.fed_prox  # type: ignore[import-not-found]
import haiku as hk  # type: ignore[import-not-found]
import jax
import jax.numpy as jnp
import numpy as np

from tests.benches.peers.turns import serve

LAYERS = (("linear", "1"), ("linear_1", "3"))  # haiku's names and ours


def forward(x: Any) -> Any:  # noqa: ANN401 - jax arrays
    """[b, 1, 28, 28] -> logits [b, 10]."""
    return hk.Sequential([hk.Flatten(), hk.Linear(200), jax.nn.relu, hk.Linear(10)])(x)


class FedjaxRounds:
    """The server's state at the start and the clients, each with its batches in order."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        lr, momentum, mu, steps, batch = arrays["settings"].tolist()
        net = hk.without_apply_rng(hk.transform(forward))

        def per_example_loss(params: Any, batch: Any, _rng: Any) -> Any:  # noqa: ANN401
            log_p = jax.nn.log_softmax(net.apply(params, batch["x"]))
            return -jnp.take_along_axis(log_p, batch["y"][:, None], axis=1)[:, 0]

        self.algorithm = fedjax.algorithms.fed_prox.fed_prox(
            per_example_loss,
            fedjax.optimizers.sgd(lr, momentum),
            fedjax.optimizers.sgd(1.0),
            fedjax.ShuffleRepeatBatchHParams(
                batch_size=int(batch), num_epochs=None, num_steps=int(steps), skip_shuffle=True
            ),
            mu,
        )
        self.start = self.algorithm.init(
            {
                theirs: {"w": jnp.array(arrays[f"start/{ours}.weight"].T), "b": jnp.array(arrays[f"start/{ours}.bias"])}
                for theirs, ours in LAYERS
            }
        )
        keys = jax.random.split(jax.random.PRNGKey(0), len(arrays["x"]))
        self.clients = [
            (str(i).encode(), fedjax.ClientDataset({"x": x, "y": y.astype(np.int32)}), keys[i])
            for i, (x, y) in enumerate(zip(arrays["x"], arrays["y"], strict=True))
        ]
        self.after = self.start

    def turn(self) -> None:
        """One round from the start, until its numbers are there."""
        self.after, _ = self.algorithm.apply(self.start, self.clients)
        jax.block_until_ready(self.after.params)

    def update(self) -> Any:  # noqa: ANN401 - an array
        """[n_params] in the order of our schema: weight [out, in] and bias of each layer."""
        parts = []
        for theirs, _ in LAYERS:
            moved = {k: np.asarray(self.after.params[theirs][k] - self.start.params[theirs][k]) for k in ("w", "b")}
            parts += [moved["w"].T.ravel(), moved["b"].ravel()]
        return np.concatenate(parts)


def main() -> None:
    fedjax.set_for_each_client_backend(sys.argv[2])
    with np.load(sys.argv[1], allow_pickle=False) as file:
        rounds = FedjaxRounds(dict(file))
    serve(rounds.turn, rounds.update, {p: importlib.metadata.version(p) for p in ("fedjax", "jax")})


if __name__ == "__main__":
    main()
