"""A hostile device that attacks a copy of an installation on loopback, for `fedcenters-coordinator attack-drill`."""
