"""Bundles over HTTP: a folder that any web server can host, and a server that adds roll-outs and the nearest center."""
