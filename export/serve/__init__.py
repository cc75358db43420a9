"""Bundles over HTTP: a folder that any web server can host, and our own server with what a folder cannot do."""
