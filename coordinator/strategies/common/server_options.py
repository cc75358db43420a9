"""What the server does with the updates of an exchange: the reduce rule, privacy noise and momentum of the centers.

    c_k <- (1 - step) c_k + step * REDUCE_i(w_i; R[i, k] a[i])

The arithmetic is in coordinator/aggregation and in momentum.py; this file holds the settings and chooses between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.aggregation.centers import Align, aggregate
from coordinator.aggregation.privacy import release_centers
from coordinator.aggregation.robust import REDUCER_NAMES, TRIMMED_REDUCERS, make_reducer
from coordinator.strategies.common.method_value import MethodValue
from coordinator.strategies.common.setting_checks import setting
from coordinator.strategies.common.updates import ClientUpdates
from coordinator.strategies.plans.sum_plan import SECURE_STARTS
from edge_client.errors import ConfigError
from edge_client.protocol.secure.parameters import SECURE_MODES
from edge_client.protocol.summed_task import MAX_BITS, MIN_BITS
from edge_client.protocol.task import Array, Schema

OF_NOISE, OF_SUMS = ("privacy-clip", "privacy-delta"), ("secure-bits", "secure-clip", "secure-start")


@dataclass(frozen=True, kw_only=True, repr=False)
class ServerOptions(MethodValue):
    """How the updates of a center's devices become the center. Raises ConfigError for values that cannot work.

    >>> import fedcenters as fc
    >>> fc.FeSEM(3, server=fc.ServerOptions(reduce="median"))
    FeSEM(3, server=ServerOptions(reduce='median'))
    """

    reduce: str = setting(
        "mean",
        '"mean", "trimmed-mean", "median", "norm-clip", "krum", "multi-krum" or "geometric-median" of the models',
        choices=REDUCER_NAMES,
    )
    trim_updates: float = setting(
        0.2,
        "share of a center's devices that may be hostile, 0 to 0.49; of the trimmed mean and both krums",
        low=0.0,
        high=0.49,
    )
    server_momentum: float = setting(  # beta of momentum.py
        0.0, "share of its last move that a center repeats after each round, 0 to 0.99", low=0.0, high=0.99
    )
    privacy_noise: float = setting(  # z of privacy.py; with secure the devices add it
        0.0, "noise multiplier; above 0 the centers are differentially private", low=0.0
    )
    privacy_clip: float = setting(  # C of privacy.py, an L2 norm
        1.0,
        "longest contribution of one device to the sum of its center; with secure in place of secure_clip",
        low=1e-9,
    )
    privacy_delta: float = setting(1e-5, "the delta for which epsilon is reported", low=1e-12, high=0.1)
    secure: str = setting(
        "off",
        '"off", or "updates" or "updates+membership": the server learns sums of devices only',
        choices=SECURE_MODES,
    )
    least_members: int = setting(5, "with secure, a center of fewer devices is not summed; at least 2", low=2)
    secure_bits: int = setting(32, "with secure, bits of a word of the sums, 16 to 32", low=MIN_BITS, high=MAX_BITS)
    secure_clip: float = setting(
        1.0,
        "with secure, longest difference of a device to its center, over the longest center's length (or 1)",
        low=1e-9,
    )
    secure_start: str = setting(
        "loss",
        'of FeSEM and WeCFL with secure: "loss", or "k-means", which tells the server updates',
        choices=SECURE_STARTS,
    )
    secret: bytes = field(default=b"", repr=False, metadata={"setting": False})  # the key of the noise

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.privacy_noise and (named := self._set_of(OF_NOISE)):
            told = f"{named} is set and privacy-noise is 0: nothing would be clipped, and nothing is private"
            raise ConfigError(told, hint=f"set privacy-noise above 0, or leave {named} out")
        if self.secure == "off" and (named := self._set_of(OF_SUMS)):
            told = f"{named} is set and secure is off: nothing would be summed in secret"
            raise ConfigError(told, hint=f"set secure = updates, or leave {named} out")
        if self.trim_updates != ServerOptions.trim_updates and self.reduce not in TRIMMED_REDUCERS:
            raise ConfigError(
                f"trim-updates is set and reduce is {self.reduce}, which leaves no update out",
                hint=f"set reduce to one of {', '.join(TRIMMED_REDUCERS)}, or leave trim-updates out",
            )
        if self.secure != "off" and self.reduce != "mean":
            raise ConfigError(
                f"secure with reduce {self.reduce}: a robust rule compares single updates",
                hint="set reduce = mean, with a method other than tkm; a device shortens its own update to secure-clip",
            )
        if self.privacy_noise and self.reduce != "mean":
            raise ConfigError(
                f"reduce {self.reduce} with privacy-noise", hint="only the mean has a bound that noise could follow"
            )

    def _set_of(self, names: Iterable[str]) -> str:
        """The first of these settings that is not the usual one; "" where all are."""
        fields = {name: name.replace("-", "_") for name in names}
        return next((n for n, f in fields.items() if getattr(self, f) != getattr(ServerOptions, f)), "")

    def aggregate(  # noqa: PLR0913 - the formula has these parts
        self,
        centers: Array,
        updates: ClientUpdates,
        R: Array,
        a: Array,
        schema: Schema,
        *,
        step: float = 1.0,
        align: Align | None = None,
    ) -> Array:
        """New centers [K, size] from m `updates`, responsibilities R [m, K], client weights a [m], a step in (0, 1].

        Private centers count a device by R alone; `a` only says whether it counts. Raises ConfigError for private
        centers without a key.
        """
        if self.privacy_noise:
            return release_centers(
                centers,
                updates.rows,
                R * (a != 0)[:, None],
                secret=self.secret,
                clip=self.privacy_clip,
                noise=self.privacy_noise,
                step=step,
                align=align,
            )
        return aggregate(
            centers,
            updates.rows,
            R,
            a,
            step=step,
            reduce=make_reducer(self.reduce, trim=self.trim_updates),
            align=align,
            n_params=schema.n_params,
            n=updates.n,
        )


SERVER_DEFAULTS = ServerOptions()


def check_applied(method: object, server: ServerOptions) -> None:
    """Refuse noise and robust rules with a user's own `round`, which may average by itself. Raises ConfigError."""
    own_round = not type(method).round.__module__.startswith("coordinator.strategies.")  # type: ignore[attr-defined]
    wanted = {"privacy-noise": server.privacy_noise > 0, "reduce": server.reduce != "mean"}
    asked = [name for name, is_wanted in wanted.items() if is_wanted]
    if own_round and asked and not getattr(method, "applies_server_options", False):
        raise ConfigError(
            f"{asked[0]} with {type(method).__name__}, which has a `round` of its own: nothing says that it uses it",
            hint="make the centers by self.server.aggregate or by super().round, and set applies_server_options = True "
            "in the class",
        )
