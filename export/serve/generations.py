"""The generations that are served now, the roll-out between them, and the bundle folder that is watched.

A bundle that appears in the watched folder is copied into the site, and becomes a candidate only when every hash is
right; until then the served generations stay. A refused one is looked at again when any of its files has changed, for
its manifest may have been copied before them. The roll-out's state is on disk before a client sees it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from edge_client.data.readers import FolderSignature, folder_signature
from edge_client.errors import ConfigError, FedcentersError
from export.bundle.reader import MANIFEST_FILE, SIGNATURE_FILE
from export.serve.rollout import Rollout, RolloutPlan
from export.serve.site import Generation, SiteFolder, replace_file

log = logging.getLogger(__name__)
ROLLOUT_FILE = ".rollout.json"  # in the site's folder; most web servers hide names with a dot
FileStamp = tuple[int, int, int]  # modification time, inode, size
BundleStamp = tuple[FileStamp, FileStamp | None]  # of a manifest and its signature


class GenerationManager:
    """One site, its roll-out, and the generations that it serves."""

    def __init__(self, root: Path, bundle: Path, plan: RolloutPlan, trusted: Sequence[bytes] = ()) -> None:
        self.site, self.plan = SiteFolder(root=root, trusted=trusted), plan
        self._bundle, self._last_stamp = bundle, _stamp(bundle)
        self._failure: tuple[BundleStamp | None, str] | None = None  # of which bundle, and why: as it was logged
        self._refused: FolderSignature | None = None  # the files of the bundle that the last fetch refused
        self._seen: FolderSignature | None = None  # those at the last look after that
        root.mkdir(parents=True, exist_ok=True)
        self.rollout = self._read_rollout()
        self.generations: dict[str, Generation] = {}
        self._load()
        self.rollout = self.rollout.keeping(self.generations)
        if (found := self.fetch_generation()) is not None:
            self.accept(found)
        if self.rollout.stable is None:
            raise ConfigError(f"{bundle} cannot be served", hint=f"fedcenters-export verify {bundle}")
        self.site.point(self.rollout.stable)  # a server may have been killed after it noted its stable generation

    def has_changed(self) -> bool:
        """Whether the watched folder has another manifest than at the last fetch, or another signature of it.

        Where that fetch refused the bundle, also whether another of its files has changed, and none since the last
        look: until then it is being copied.
        """
        now = _stamp(self._bundle)
        if now is None or now != self._last_stamp or self._refused is None:
            return now is not None and now != self._last_stamp
        before, self._seen = self._seen, folder_signature(self._bundle)
        return self._seen not in {None, self._refused} and self._seen == before

    def fetch_generation(self) -> Generation | None:
        """Copy the watched bundle into the site; None when a check fails. `accept` serves it.

        Copying takes a while; it may run in a thread beside requests, since it changes nothing that they read. Raises
        OSError for a failure that may pass; `look_again` takes it.
        """
        self._last_stamp, self._refused, files = _stamp(self._bundle), None, folder_signature(self._bundle)
        try:
            return self.site.open(self.site.add(self._bundle))
        except FedcentersError as wrong:
            log.warning("the bundle in %s is not served: %s", self._bundle, wrong.message)
            self._refused = files
            return None

    def look_again(self, failed: OSError | MemoryError) -> None:
        """Fetching or accepting failed, as on a full disk: the next look tries again. A reason is told once."""
        reason = str(failed) or "there is not enough memory"
        failure = (self._last_stamp, reason)
        if failure != self._failure:
            log.warning("the bundle in %s is not served yet, and is tried again: %s", self._bundle, reason)
        self._failure, self._last_stamp = failure, None

    def accept(self, generation: Generation) -> None:
        """Make a fetched generation the candidate, or the stable one where there is none. Raises OSError."""
        self.generations[generation.name] = generation  # its signature may be another one
        if generation.name in self.rollout.withdrawn:
            stays = f"; {self.rollout.stable:.16} stays" if self.rollout.stable else ""
            log.warning("the bundle in %s is not served: %.16s was withdrawn%s", self._bundle, generation.name, stays)
        self.store_rollout(self.rollout.offer(generation.name, self.plan))

    def store_rollout(self, rollout: Rollout) -> None:
        """Make this the roll-out's state, on disk first. Raises OSError; then the state is as it was."""
        if rollout == self.rollout:
            return
        before = self.rollout
        replace_file(self.site.root / ROLLOUT_FILE, json.dumps(rollout.to_json()).encode())
        if rollout.stable is not None and rollout.stable != before.stable:
            self.site.point(rollout.stable)
        self.rollout = rollout
        if (rollout.stable, rollout.candidate) != (before.stable, before.candidate):
            waits = f" for {self.plan.share:g} of the devices, until {self.plan.pairs} pairs of reports have come"
            told = f"{rollout.candidate:.16}{waits}" if rollout.candidate else "none"
            if before.candidate is not None and before.candidate in rollout.withdrawn:
                told += f"; {before.candidate:.16} was withdrawn, since its devices report less accuracy"
            log.info("stable %.16s, candidate %s", rollout.stable, told)
            self._load()

    def generation(self, device: str | None) -> Generation:
        """The generation that a device is served; None stands for a device without a name."""
        return self.generations[str(self.rollout.generation_for(device, self.plan))]

    def _load(self) -> None:
        """Remove old generations from the site and open the others, but for those that are damaged there."""
        served = [name for name in (self.rollout.stable, self.rollout.candidate) if name is not None]
        found = {name: self.generations.get(name) or self._open(name) for name in self.site.prune(served)}
        self.generations = {name: generation for name, generation in found.items() if generation is not None}

    def _open(self, name: str) -> Generation | None:
        try:
            return self.site.open(name)
        except FedcentersError as wrong:
            log.warning("generation %.16s in %s is not served: %s", name, self.site.root, wrong.message)
            return None

    def _read_rollout(self) -> Rollout:
        path = self.site.root / ROLLOUT_FILE
        if not path.is_file():
            return Rollout()
        try:
            return Rollout.from_json(json.loads(path.read_bytes()))
        except (ValueError, KeyError, TypeError) as wrong:
            raise ConfigError(f"{path} cannot be read: {wrong!r}", hint="remove it to begin a new roll-out") from wrong


def _stamp(bundle: Path) -> BundleStamp | None:
    manifest, signature = (_file_stamp(bundle / name) for name in (MANIFEST_FILE, SIGNATURE_FILE))
    return None if manifest is None else (manifest, signature)


def _file_stamp(path: Path) -> FileStamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
