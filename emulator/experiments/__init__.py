"""The papers' tables as TOML files, and what runs them cell by cell."""
