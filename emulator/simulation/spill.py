"""Bounded memory for a long run of a large fleet: the devices' own models, and the records of the rounds.

The least recently used vectors, and all records, are written to unnamed temporary files, which the system deletes when
the process ends. The files are read and written, not mapped, so that their pages do not count as memory of the process.
TMPDIR is the folder of the files; a folder in memory saves nothing.
"""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, overload

import numpy as np

from coordinator.rounds.round_record import RoundRecord
from edge_client.protocol.task import ClientId, Flat

MAX_MEMORY_BYTES = 256 * 2**20  # of models in memory; digits-mlp has 36 kB, so no demonstration ever writes a file
Slot = tuple[ClientId, str]


class SpilledModels(MutableMapping[Slot, Flat]):
    """Vectors by (device, slot), the latest `memory` bytes of them in memory and the rest in a file.

    The mapping owns a vector that is stored in it. A vector that was in the file is returned as a new array.
    """

    def __init__(self, memory: int | None = None) -> None:
        self._memory, self._held_bytes = MAX_MEMORY_BYTES if memory is None else memory, 0
        self._held: OrderedDict[Slot, Flat] = OrderedDict()
        self._stored: dict[Slot, _Place] = {}
        self._free: dict[int, list[int]] = {}  # free offsets in the file, by size in bytes
        self._file: IO[bytes] | None = None
        self._end = 0

    def __getitem__(self, key: Slot) -> Flat:
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        return self._read(self._stored[key])

    def __setitem__(self, key: Slot, vector: Flat) -> None:
        if key in self:
            del self[key]
        self._held[key] = vector if vector.base is None else vector.copy()  # a view keeps its base array
        self._held_bytes += vector.nbytes
        while self._held_bytes > self._memory:
            oldest, old = self._held.popitem(last=False)
            self._held_bytes -= old.nbytes
            self._stored[oldest] = self._write(old)

    def __delitem__(self, key: Slot) -> None:
        if key in self._held:
            self._held_bytes -= self._held.pop(key).nbytes
        else:
            place = self._stored.pop(key)
            self._free.setdefault(place.size, []).append(place.offset)

    def __contains__(self, key: object) -> bool:
        return key in self._held or key in self._stored

    def __iter__(self) -> Iterator[Slot]:
        yield from (*self._held, *self._stored)

    def __len__(self) -> int:
        return len(self._held) + len(self._stored)

    def clear(self) -> None:
        """Forget all vectors; the file stays, and is written from its beginning."""
        self._held.clear()
        self._stored.clear()
        self._free.clear()
        self._held_bytes = self._end = 0

    def _write(self, vector: Flat) -> _Place:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="fedcenters-", buffering=0)  # noqa: SIM115 - lives as long as this
            weakref.finalize(self, self._file.close)
        free = self._free.get(vector.nbytes)
        offset = free.pop() if free else self._end
        self._end = max(self._end, offset + vector.nbytes)
        self._file.seek(offset)
        np.ascontiguousarray(vector).tofile(self._file)
        return _Place(offset=offset, count=vector.size, dtype=vector.dtype)

    def _read(self, place: _Place) -> Flat:
        if self._file is None:
            raise ValueError("a vector is said to be in a file that was never written")
        self._file.seek(place.offset)
        return np.fromfile(self._file, place.dtype, place.count)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """The position of a vector in the file."""

    offset: int
    count: int
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        return self.count * self.dtype.itemsize


class SpilledRecords(Sequence[RoundRecord]):
    """JSON objects that are appended to a file and parsed at each access, so that a run of any length fits.

    One thread appends; others may read meanwhile, as may processes that are forked from this one, which have the place
    in the file in common: a line is read by its own place.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="fedcenters-")  # noqa: SIM115 - lives as long as this
        weakref.finalize(self, self._file.close)
        self._starts = [0]
        self._whole: SpilledRecords | None = None

    def append(self, record: RoundRecord) -> None:
        """Write a record. It must consist of JSON types, so that reading gives an equal object."""
        line = json.dumps(record).encode()
        self._file.seek(self._starts[-1])
        self._file.write(line)
        self._file.flush()
        self._starts.append(self._starts[-1] + len(line))

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> RoundRecord: ...

    @overload
    def __getitem__(self, index: slice) -> list[RoundRecord]: ...

    def __getitem__(self, index: int | slice) -> RoundRecord | list[RoundRecord]:
        """A record or a slice of records; negative indices count from the end."""
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        number = range(len(self))[index]
        start, end = self._starts[number : number + 2]
        record: RoundRecord = json.loads(os.pread(self._file.fileno(), end - start, start))
        return record

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # it grows

    def so_far(self) -> SpilledRecords:
        """The records that there are now; later ones are not added."""
        view = SpilledRecords.__new__(SpilledRecords)
        kept = {"_starts": self._starts[:], "_whole": self}  # the file lives as long as the whole
        view.__dict__ |= vars(self) | kept
        return view

    def __getstate__(self) -> list[RoundRecord]:
        """For pickle: the records, because a file cannot be pickled."""
        return list(self)

    def __setstate__(self, records: list[RoundRecord]) -> None:
        self.__init__()  # type: ignore[misc] # a file of its own
        for record in records:
            self.append(record)
