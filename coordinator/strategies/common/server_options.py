"""What the server does with the updates of an exchange: the reduce rule, privacy noise and momentum of the centers.

    c_k <- (1 - step) c_k + step * REDUCE_i(w_i; R[i, k] a[i])

The arithmetic is in coordinator/aggregation and in momentum.py; this file holds the settings and chooses between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coordinator.aggregation.centers import Align, aggregate
from coordinator.aggregation.privacy import release_centers
from coordinator.aggregation.robust import REDUCER_NAMES, TRIMMED_REDUCERS, make_reducer
from coordinator.strategies.common.method_value import MethodValue
from coordinator.strategies.common.setting_checks import check_choice, check_range
from coordinator.strategies.common.updates import ClientUpdates
from coordinator.strategies.plans.sum_plan import SECURE_STARTS
from edge_client.errors import ConfigError
from edge_client.protocol.secure.parameters import SECURE_MODES
from edge_client.protocol.summed_task import MAX_BITS, MIN_BITS
from edge_client.protocol.task import Array, Schema

NOT_A_SETTING: Mapping[str, Any] = {"setting": False}  # metadata of a field that users cannot set
OF_NOISE, OF_SUMS = ("privacy-clip", "privacy-delta"), ("secure-bits", "secure-clip", "secure-start")


@dataclass(frozen=True, kw_only=True, repr=False)
class ServerOptions(MethodValue):
    """How the updates of a center's devices become the center. Raises ConfigError for values that cannot work.

    Args:
        reduce: "mean", "trimmed-mean", "median", "norm-clip", "krum", "multi-krum" or "geometric-median" of the models.
        trim_updates: share of a center's devices that may be hostile, 0 to 0.49; of the trimmed mean and both krums.
        server_momentum: share of its last move that a center repeats after each round, 0 to 0.99.
        privacy_noise: noise multiplier; above 0 the centers are differentially private.
        privacy_clip: longest contribution of one device to the sum of its center; with secure in place of secure_clip.
        privacy_delta: the delta for which epsilon is reported.
        secure: "off", or "updates" or "updates+membership": the server learns sums of devices only.
        least_members: with secure, a center of fewer devices is not summed; at least 2.
        secure_bits: with secure, bits of a word of the sums, 16 to 32.
        secure_clip: with secure, longest difference of a device to its center, over the longest center's length (or 1).
        secure_start: of FeSEM and WeCFL with secure: "loss", or "k-means", which tells the server updates.

    >>> import fedcenters as fc
    >>> fc.FeSEM(3, server=fc.ServerOptions(reduce="median"))
    FeSEM(3, server=ServerOptions(reduce='median'))
    """

    reduce: str = "mean"
    trim_updates: float = 0.2
    server_momentum: float = 0.0  # beta of momentum.py
    privacy_noise: float = 0.0  # z of privacy.py; with secure the devices add it
    privacy_clip: float = 1.0  # C of privacy.py, an L2 norm
    privacy_delta: float = 1e-5
    secure: str = "off"
    least_members: int = 5
    secure_bits: int = 32
    secure_clip: float = 1.0
    secure_start: str = "loss"
    secret: bytes = field(default=b"", repr=False, metadata=NOT_A_SETTING)  # the key of the noise

    def __post_init__(self) -> None:
        check_choice("reduce", self.reduce, REDUCER_NAMES)
        check_range("trim-updates", self.trim_updates, low=0.0, high=0.49)
        check_range("server-momentum", self.server_momentum, low=0.0, high=0.99)
        check_range("privacy-noise", self.privacy_noise, low=0.0)
        check_range("privacy-clip", self.privacy_clip, low=1e-9)
        check_range("privacy-delta", self.privacy_delta, low=1e-12, high=0.1)
        check_choice("secure", self.secure, SECURE_MODES)
        check_range("least-members", self.least_members, low=2)
        check_range("secure-bits", self.secure_bits, low=MIN_BITS, high=MAX_BITS)
        check_range("secure-clip", self.secure_clip, low=1e-9)
        check_choice("secure-start", self.secure_start, SECURE_STARTS)
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
            how = {"clip": self.privacy_clip, "noise": self.privacy_noise, "step": step}
            return release_centers(centers, updates.rows, R * (a != 0)[:, None], secret=self.secret, align=align, **how)
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
