#!/bin/sh
# Makes an Android phone with Termux a device of a federation. In Termux: sh termux.sh porch.tar
# porch.tar is what `fedcenters-edge flash --board generic-arm64 --python 3.13 --bundle porch.tar` writes. Run again, with
# the same or a newer archive, it changes what differs and keeps the state. docs/train-on-a-phone-with-termux.md
set -eu
bundle=$(realpath "${1:?name the archive that fedcenters-edge flash --bundle wrote}")
image=${2:-debian:13} # or an archive of a Debian 13 root file system
: "${PREFIX:?this script is for Termux}"
service=$PREFIX/var/service/fedcenters
client="/usr/bin/python3 /opt/fedcenters/launch.py"
config=/etc/fedcenters/client.toml

debian() { proot-distro login "$@"; }

pkg install -y proot-distro termux-api termux-services
debian fedcenters -- true 2>/dev/null || proot-distro install --name fedcenters "$image"
debian fedcenters -- sh -c 'command -v python3 || { apt-get update && apt-get install -y --no-install-recommends python3; }'
debian --bind "$bundle:/mnt/device.tar" fedcenters -- tar --extract --no-same-owner --file /mnt/device.tar --directory /
debian fedcenters -- sh -c 'mkdir -p /var/lib/fedcenters/data; cd / && sha256sum --check --quiet /opt/fedcenters/MANIFEST'

# the service: restarted when it ends; 100 % is reached on a charger only
mkdir -p "$service/log"
ln -sf "$PREFIX/share/termux-services/svlogger" "$service/log/run"
cat > "$service/run" <<END
#!$PREFIX/bin/sh
exec 2>&1
termux-wake-lock
exec proot-distro login --env FEDCENTERS_MIN_BATTERY_PERCENT=100 fedcenters -- $client join --config $config
END
chmod 700 "$service/run"

# the phone starts, and with the app Termux:Boot this
mkdir -p "$HOME/.termux/boot"
cat > "$HOME/.termux/boot/fedcenters" <<END
#!$PREFIX/bin/sh
termux-wake-lock
. $PREFIX/etc/profile.d/start-services.sh
END
chmod 700 "$HOME/.termux/boot/fedcenters"

debian fedcenters -- $client doctor --config $config || echo "mend what FAIL says, then: sv up fedcenters" >&2
sv-enable fedcenters
