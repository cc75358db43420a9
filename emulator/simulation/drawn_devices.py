"""Devices whose samples are drawn when they are used, so that a fleet of any size fits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from coordinator.strategies.numbered_fleet import NumberedFleet
from edge_client.data.dataset import DeviceData
from edge_client.protocol.task import I64, ClientId

MOST_HELD = 2_048  # devices whose samples stay in memory


class DrawnDevices(Mapping[ClientId, DeviceData]):
    """`draw` gives the samples of a device by its number, always the same; `samples` [n] says how many train.

    The devices that were used last stay in memory.
    """

    def __init__(self, samples: I64, draw: Callable[[int], DeviceData], *, held: int = MOST_HELD) -> None:
        self.fleet, self._draw, self._most = NumberedFleet(samples), draw, held
        self._held: OrderedDict[ClientId, DeviceData] = OrderedDict()

    def __getitem__(self, who: ClientId) -> DeviceData:
        if who in self._held:
            self._held.move_to_end(who)
            return self._held[who]
        if (number := self.fleet.names.number(who)) is None:
            raise KeyError(who)
        drawn = self._held[who] = self._draw(number)
        if len(self._held) > self._most:
            self._held.popitem(last=False)
        return drawn

    def __contains__(self, who: object) -> bool:
        return who in self.fleet

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.fleet)

    def __len__(self) -> int:
        return len(self.fleet)
