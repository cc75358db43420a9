"""The systemd files of a board, as text. They hold nothing of a configuration, so no configuration can add a directive.

Directives that an older systemd does not know are skipped by it with a warning; none of them is needed to run.
`MemoryDenyWriteExecute` is left out on purpose: runtimes that generate code need it off.
"""

from __future__ import annotations

from collections.abc import Sequence

SERVICE_USER = "fedcenters"
INSTALL_FOLDER = "/opt/fedcenters"
CONFIG_PATH = "/etc/fedcenters/client.toml"
STATE_FOLDER = "/var/lib/fedcenters"
COMPILED_FOLDER = "/run/fedcenters/pycache"  # in memory: Python fails at every start with a file that lost its end
WATCHDOG_S = 180  # well above the slowest step between two signs of life: opening a session on a small board
SERVICE_NAME = "fedcenters-edge.service"

_UNIT = """[Unit]
Description=fedcenters edge client
Wants=network-online.target time-sync.target
After=network-online.target time-sync.target
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
Environment=PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX={compiled}
ExecStart={python} {home}/launch.py join --config {config}
User={user}
{groups}StateDirectory=fedcenters
StateDirectoryMode=0700
RuntimeDirectory=fedcenters
RuntimeDirectoryMode=0700
RuntimeDirectoryPreserve=restart
UMask=0077
Restart=always
RestartSec=15
TimeoutStartSec=300
TimeoutStopSec=30
WatchdogSec={watchdog}
LogRateLimitIntervalSec=30
LogRateLimitBurst=200
Nice=10
CPUWeight=20
IOSchedulingClass=idle
MemoryHigh=60%
MemoryMax=75%
TasksMax=64
LimitCORE=0
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome={protect_home}
PrivateTmp=yes
{private_devices}ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
CapabilityBoundingSet=
SystemCallArchitectures=native
SystemCallFilter=@system-service

[Install]
WantedBy=multi-user.target
"""


def service_unit(*, python: str, groups: Sequence[str], home_is_read: bool) -> str:
    """The service. `python` is the interpreter's path; `groups` are a profile's.

    `home_is_read`: the data lies under /home, which the service otherwise cannot see.
    """
    return _UNIT.format(
        python=python,
        home=INSTALL_FOLDER,
        config=CONFIG_PATH,
        compiled=COMPILED_FOLDER,
        user=SERVICE_USER,
        watchdog=WATCHDOG_S,
        groups=f"SupplementaryGroups={' '.join(groups)}\n" if groups else "",
        protect_home="read-only" if home_is_read else "yes",
        # groups are for device nodes, which PrivateDevices and ProtectClock (by its device policy) would hide
        private_devices="" if groups else "PrivateDevices=yes\n",
    ).replace("ProtectClock=yes\n", "" if groups else "ProtectClock=yes\n")


def sysusers_conf() -> str:
    """The service's user, made by systemd-sysusers at boot: a foreign host cannot know its number."""
    return f'u {SERVICE_USER} - "fedcenters edge client" {STATE_FOLDER}\n'


def watchdog_conf() -> str:
    """A drop-in of systemd itself: a board that hangs is reset by its own watchdog."""
    return "[Manager]\nRuntimeWatchdogSec=30\n"
