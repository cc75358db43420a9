"""The boards that `flash` supports, as data: architecture, Python, glibc, runtime, and notes for the user.

Wheels resolve for every profile. A profile does not describe a board's speed, heat or GPU. Sources of the facts: the
distributions' own package lists (Python and glibc of Ubuntu 20.04, 22.04, 24.04 and Debian 12, 13).
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_client.errors import ConfigError, UsageError

MIN_PYTHON = (3, 10)  # the oldest Python that the client runs on
PYTHONS = ("3.13", "3.12", "3.11", "3.10")
MACHINES = {"aarch64": 183, "x86_64": 62}  # e_machine of an ELF file


@dataclass(frozen=True, kw_only=True)
class BoardProfile:
    """One kind of board. `python` is what its newest system has, `glibc` the newest that wheels may ask for."""

    name: str
    title: str
    machine: str = "aarch64"  # as wheels and ELF files call it: a key of MACHINES
    python: str = "3.11"
    glibc: tuple[int, int]
    engine: str = "onnx"
    max_temperature: int = 80  # °C; a board slows itself down soon after
    tegra: bool = False  # a Jetson: /etc/nv_tegra_release is there
    groups: tuple[str, ...] = ()  # that the service needs for its devices
    own_python: bool = False  # its system Python is below the floor
    notes: tuple[str, ...] = ()

    def platforms(self) -> tuple[str, ...]:
        """The wheel platforms that this board can load, newest last."""
        tags = [f"manylinux_2_{minor}_{self.machine}" for minor in range(17, self.glibc[1] + 1)]
        return (f"manylinux2014_{self.machine}", *tags, f"linux_{self.machine}")


_GPU = (
    "the CPU trains unless NVIDIA's own wheel is given with --wheel (onnxruntime-gpu or torch for this JetPack); "
    "wheels of PyPI do not use a Jetson's GPU"
)
_JETPACK_5 = (
    "JetPack 5 has Python 3.8, below our floor of 3.10: it needs a second Python, given with --python-home; NVIDIA's "
    "JetPack 5 wheels are for 3.8 only, so the CPU trains"
)
BOARD_PROFILES: dict[str, BoardProfile] = {
    profile.name: profile
    for profile in (
        BoardProfile(
            name="jetson-orin",
            title="NVIDIA Jetson Orin, JetPack 6 (Ubuntu 22.04)",
            python="3.10",
            glibc=(2, 35),
            tegra=True,
            groups=("video", "render"),
            notes=(_GPU,),
        ),
        BoardProfile(
            name="jetson-xavier",
            title="NVIDIA Jetson Xavier, JetPack 5 (Ubuntu 20.04)",
            glibc=(2, 31),
            tegra=True,
            groups=("video", "render"),
            own_python=True,
            notes=(_JETPACK_5,),
        ),
        BoardProfile(
            name="raspberry-pi-5",
            title="Raspberry Pi 5, 64-bit Raspberry Pi OS (Debian 13 or 12)",
            python="3.13",
            glibc=(2, 36),
        ),
        BoardProfile(
            name="raspberry-pi-4",
            title="Raspberry Pi 4, 3 or Zero 2 W, 64-bit Raspberry Pi OS (Debian 13 or 12)",
            python="3.13",
            glibc=(2, 36),
        ),
        BoardProfile(
            name="generic-arm64",
            title="any 64-bit ARM board with systemd and glibc 2.31 or newer",
            glibc=(2, 31),
        ),
        BoardProfile(
            name="x86-64",
            title="any 64-bit PC with systemd and glibc 2.31 or newer",
            machine="x86_64",
            glibc=(2, 31),
        ),
    )
}


def board_profile(name: str) -> BoardProfile:
    """The profile of a board. Raises UsageError for an unknown one."""
    if name not in BOARD_PROFILES:
        raise UsageError(f"unknown board {name!r}", hint=f"use one of {', '.join(BOARD_PROFILES)}")
    return BOARD_PROFILES[name]


def check_machine(where: str, machine: str | None, profile: BoardProfile) -> None:
    """Raise ConfigError unless a system is for the board's processor; `where` is a folder or a host."""
    if machine is None:
        raise ConfigError(
            f"{where} has no program that tells its processor: no usr/bin/python3, no shell, no sbin/init",
            hint="the system there is not whole; write the card again and name the mount point of its root partition",
        )
    if machine != profile.machine:
        fits = [name for name, other in BOARD_PROFILES.items() if other.machine == machine]
        raise ConfigError(
            f"{where} is a system for {machine}, a {profile.name} has {profile.machine}",
            hint=f"choose another --board ({', '.join(fits)})"
            if fits
            else f"write a 64-bit system for {profile.machine}; no training runtime has wheels for {machine}",
        )


def check_python_of(where: str, version: str | None) -> None:
    """Raise ConfigError unless a system has a Python on which the client runs."""
    if version is None or tuple(map(int, version.split("."))) < MIN_PYTHON:
        raise ConfigError(
            f"{where} has {'no Python 3' if version is None else f'Python {version}'}, "
            f"the client needs {MIN_PYTHON[0]}.{MIN_PYTHON[1]}",
            hint="apt install python3 there, or give an interpreter with --python-home",
        )


def check_python(version: str) -> str:
    """A Python that wheels are made for; raises UsageError."""
    if version not in PYTHONS:
        raise UsageError(f"Python {version!r} on the board", hint=f"use one of {', '.join(PYTHONS)}")
    return version
