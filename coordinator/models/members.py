"""What models and sums of them are called, and where a sum's members lie in its vector. Needs no torch.

registry.py makes the models, sums.py has the module of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edge_client.errors import ConfigError
from edge_client.protocol.task import Array, Schema
from export.plugins import check_name

MEMBERS = "members"  # the tensors of member m are called members.m.<its own name>
TRAINED = "trained"  # the buffer [members] of ones for those that a step moves, and zeros
PLUS = "+"  # between the names of members: digits-mlp+digits-mlp
MODEL_NAMES = (  # of those that registry.py has
    "digits-mlp",
    "wecfl-cnn",
    "gn-cnn",
    "mnist-mlp",
    "wisdm-mlp",
    "cifar-lenet",
    "femnist-cnn",
    "celeba-cnn",
    "letters-cnn",
    "linear-regression",
)


def check_model_name(name: str) -> None:
    """Raises UsageError for an unknown name, also in a sum, and for a module that is nowhere. Nothing is imported."""
    for part in name.split(PLUS) if name else ():
        check_name("models", part, MODEL_NAMES)


def summed_name(name: str, members: int) -> str:
    """The name of a sum of `members` such models; that of a sum stays as it is.

    >>> summed_name("digits-mlp", 2)
    'digits-mlp+digits-mlp'
    """
    return name if PLUS in name else PLUS.join([name] * members)


@dataclass(frozen=True)
class SumLayout:
    """Where the members of a sum lie in vectors [..., schema.size]. Raises ConfigError for the schema of another model.

    `members` is how many a method needs.
    """

    schema: Schema
    members: int

    def __post_init__(self) -> None:
        found = len({t.name.split(".")[1] for t in self.schema.tensors if t.name.startswith(f"{MEMBERS}.")})
        if found != self.members or TRAINED not in self.schema.slices:
            raise ConfigError(
                f"this method trains a sum of {self.members} models, and the model is "
                + (f"a sum of {found}" if found else "none"),
                hint=f"name each of them, as {summed_name('digits-mlp', self.members)}",
            )

    @cached_property
    def places(self) -> NDArray[np.bool_]:
        """[members, size] which numbers, running statistics included, are those of each member."""
        places = np.zeros((self.members, self.schema.size), dtype=np.bool_)
        for name, at in self.schema.slices.items():
            if name.startswith(f"{MEMBERS}."):
                places[int(name.split(".")[1]), at] = True
        return places

    def with_trained(self, vectors: Array, *members: int) -> Array:
        """Copies in which a step moves these members only; all of them, where none is named."""
        switched = np.array(vectors)
        switch = np.ones(self.members) if not members else np.zeros(self.members)
        switch[list(members)] = 1
        switched[..., self.schema.slices[TRAINED]] = switch
        return switched

    def last_as_first(self, vector: Array) -> Array:
        """A copy whose last member has the numbers of the first, where it has as many; else the vector."""
        first, last = self.places[0], self.places[-1]
        copied = np.array(vector)
        if first.sum() == last.sum():
            copied[last] = vector[first]
        return copied

    def with_member(self, vectors: Array, member: int, of: Array) -> Array:
        """Copies in which this member is that of the vectors `of`."""
        return np.where(self.places[member], of, vectors)
