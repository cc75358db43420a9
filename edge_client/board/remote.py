"""Flashes a board that runs, with the system's own ssh: copy beside, check hashes, move into place, start the service.

One connection asks, one copies, one installs; each runs `sh -s` there, so nothing is needed on the board but a shell,
tar, sha256sum and systemd, and a user who is root or may `sudo` without a password. Passwords and host keys are ssh's.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from edge_client.board.board_files import IDENTITY_FOLDER, MANIFEST_PATH, BoardFile
from edge_client.board.profiles import BoardProfile, check_machine, check_python_of
from edge_client.board.systemd_unit import CONFIG_PATH, INSTALL_FOLDER, SERVICE_NAME
from edge_client.board.targets import UPDATE_HINT, make_archive, owner_of, run_fed
from edge_client.errors import ConfigError, NetworkError, RuntimeMissing

HOST_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:\[\]%-]{0,254}")  # never an option of ssh
SSH_TIMEOUT_S = 900
SEPARATOR = "--fedcenters--"
BEGIN = "fedcenters begins"  # what comes before is of the login shell's own files, as a greeting in .bashrc
TOKEN_PATH = f"{IDENTITY_FOLDER}/token".lstrip("/")

_INSPECT_SCRIPT = """set -u
root=$1
become=
test "$(id -u)" = 0 || become="sudo -n"
uname -m
python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo none
test -e "$root/etc/nv_tegra_release" && echo tegra || echo plain
id -u
echo {separator}
cat "$root{config}" 2>/dev/null
echo {separator}
cat "$root{manifest}" 2>/dev/null
cd "$root/" && test -e ".{manifest}" && $become sha256sum --check --status ".{manifest}" && echo {separator}whole
echo {separator}token
$become sh -c 'cat "$1.used"; sha256sum < "$1"' - "$root/{token}" 2>/dev/null
exit 0
"""

# Each step can be repeated, and flashing again ends it. What takes a place is on the card before: a new folder without
# its files would start after a power cut.
_INSTALL_SCRIPT = """set -eu
umask 022
root=$1
tmp=$2
cd "$tmp"
tar -xf overlay.tar
rm overlay.tar
sha256sum --check --quiet ".{manifest}"
mkdir -p "$root{home}" "$root/etc/fedcenters"
for name in $(cd "$tmp{home}" && ls -A); do
    rm -rf "$root{home}/.old-$name" "$root{home}/.new-$name"
    cp -RP "$tmp{home}/$name" "$root{home}/.new-$name"
done
sync
for name in $(cd "$tmp{home}" && ls -A); do
    test ! -e "$root{home}/$name" || mv "$root{home}/$name" "$root{home}/.old-$name"
    mv "$root{home}/.new-$name" "$root{home}/$name"
    rm -rf "$root{home}/.old-$name"
done
cp -RP "$tmp/etc/." "$root/etc/"
cp -RP "$tmp/usr/." "$root/usr/"
token={token}
if test -e "$tmp/$token" &&
    test "$(sha256sum < "$tmp/$token" | cut -d " " -f 1)" != "$(cat "$root/$token.used" 2>/dev/null)"; then
    (umask 077 && mkdir -p "$root/var/lib/fedcenters/identity" && cp "$tmp/$token" "$root/$token")
fi
systemd-sysusers "$root/usr/lib/sysusers.d/fedcenters.conf"
systemd-tmpfiles --create "$root/usr/lib/tmpfiles.d/fedcenters.conf"
test ! -e "$root/$token" || chown fedcenters:fedcenters "$root/$token"
sync
systemctl daemon-reload
systemctl enable {service}
systemctl restart {service}
"""


@dataclass(frozen=True, kw_only=True)
class BoardInfo:
    """The properties of a board, as it reports them."""

    machine: str
    python: str  # "3.11", or "none"
    tegra: bool
    root: bool  # whether the login is root
    config: bytes  # its client.toml, empty when there is none
    manifest: bytes  # what was flashed, empty when nothing, or when a file of it is damaged
    tokens: frozenset[str] = frozenset()  # SHA-256 of the one that waits there, and of the one that was used last


@dataclass(frozen=True, kw_only=True)
class RemoteBoard:
    """`user@host`; `root` is where the board's files are: "" but in tests."""

    host: str
    root: str = ""

    def __post_init__(self) -> None:
        if not HOST_PATTERN.fullmatch(self.host):
            raise ConfigError(f"--ssh {self.host!r} is no user@host", hint="--ssh pi@raspberrypi.local")

    def inspect(self) -> BoardInfo:
        """Ask what is there. Raises NetworkError when ssh does not get through."""
        places = {"config": CONFIG_PATH, "manifest": MANIFEST_PATH, "token": TOKEN_PATH}
        script = _INSPECT_SCRIPT.format(separator=SEPARATOR, **places)
        head, config, listed = self._run(script, self.root).split(f"{SEPARATOR}\n".encode(), 2)
        machine, python, kind, user = head.decode("utf-8", "replace").split()
        listed, _, tokens = listed.partition(f"{SEPARATOR}token\n".encode())
        manifest, found, _ = listed.partition(f"{SEPARATOR}whole".encode())
        return BoardInfo(
            machine={"arm64": "aarch64", "amd64": "x86_64"}.get(machine, machine),
            python=python,
            tegra=kind == "tegra",
            root=user == "0",
            config=config,
            manifest=manifest if found else b"",
            tokens=frozenset(tokens.decode("ascii", "replace").split()),
        )

    def install(self, entries: Sequence[BoardFile], board: BoardInfo, *, update: bool) -> bool:
        """Install the files and start the service; -> False if all files were there already. Raises ConfigError."""
        wanted = entries[-1].data
        has_token = all(entry.sha256 in board.tokens for entry in entries if entry.memory)
        if board.manifest == wanted and has_token:
            return False
        ours = next(entry.data for entry in entries if entry.path == CONFIG_PATH)
        if board.config and owner_of(board.config) != owner_of(ours):
            was = owner_of(board.config)
            raise ConfigError(
                f"{self.host} is {was[1]} of {was[0]}", hint="flash another board, or remove /etc/fedcenters there"
            )
        if board.config and not update and board.manifest != wanted:
            raise ConfigError(f"{self.host} has been flashed with something else", hint=UPDATE_HINT)
        folder = self._run("mktemp -d /tmp/fedcenters.XXXXXX").decode().strip()
        try:
            self._pipe(f"cat > {shlex.quote(folder)}/overlay.tar", make_archive(entries))
            places = {"manifest": MANIFEST_PATH, "token": TOKEN_PATH, "home": INSTALL_FOLDER}
            script = _INSTALL_SCRIPT.format(service=SERVICE_NAME, **places)
            self._run(script, self.root, folder, become=not board.root)
        finally:
            self._run('rm -rf "$1"', folder, become=not board.root)
        return True

    def _run(self, script: str, *arguments: str, become: bool = False) -> bytes:
        """A script through `sh -s`, its arguments quoted; `become` root by sudo."""
        shell = " ".join([*(["sudo", "-n"] if become else []), "sh", "-s", "--", *(shlex.quote(a) for a in arguments)])
        return self._pipe(shell, script.encode())

    def _pipe(self, command: str, data: bytes) -> bytes:
        try:
            asked = ["ssh", "-C", "-o", "BatchMode=yes", self.host, f"echo {BEGIN}; {command}"]
            done = run_fed(asked, data, capture_output=True, check=False, timeout=SSH_TIMEOUT_S)
        except FileNotFoundError as missing:
            raise RuntimeMissing("ssh is not installed", hint="apt install openssh-client") from missing
        except subprocess.TimeoutExpired as slow:
            raise NetworkError(f"{self.host} took longer than {SSH_TIMEOUT_S} s", hint="try again") from slow
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
            hint = f"`ssh {self.host}` must work without a password, and so must sudo there"
            raise NetworkError(f"{self.host}: {said[-1]}", hint=hint)
        _, begun, told = done.stdout.partition(f"{BEGIN}\n".encode())
        if not begun:
            raise NetworkError(f"{self.host} ran no command", hint=f"`ssh {self.host} echo hello` must print hello")
        return told


def check_board(board: BoardInfo, profile: BoardProfile, host: str, *, own_python: bool) -> None:
    """Raise ConfigError, with what to do, unless a board is what the profile says."""
    check_machine(host, board.machine, profile)
    if profile.tegra and not board.tegra:
        raise ConfigError(f"{host} is no Jetson: /etc/nv_tegra_release is missing", hint="choose another --board")
    if not own_python:
        check_python_of(host, None if board.python == "none" else board.python)
