"""One-time tokens: each allows one named device one certificate within a day. Only their hashes are stored.

A token is 32 random bytes, so its SHA-256 needs no salt. The first request with a token binds it to that request's key;
the same key may ask again (its answer may have been lost), any other key is refused and counted. Time is an argument,
in Unix seconds.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from edge_client.errors import ConfigError, FedcentersError

TOKEN_LIFETIME_HOURS = 24.0
TOKENS_SCHEMA = """
create table if not exists tokens (
    hash text primary key, cid text not null, expires_s real not null,
    key text, used_s real, refused integer not null default 0
)
"""


class TokenRefused(FedcentersError):
    """A token that allows nothing; `code` is `unknown`, `expired`, `used` or `revoked`."""

    exit_code = 5

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message, hint="ask the operator of the federation for a new token")
        self.code = code


@dataclass(frozen=True, kw_only=True)
class TokenState:
    """The state of a token, without the token itself."""

    cid: str
    expires_s: float
    used: bool
    refused: int  # requests with another key


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """The tokens of one authority, in an SQLite file."""

    path: Path

    def issue(self, cid: str, now_s: float) -> str:
        """A new token for a device, which is stored as a hash only. An unused token of the same device is deleted."""
        token = secrets.token_urlsafe(32)
        with self._open() as rows:
            rows.execute("delete from tokens where cid = ? and key is null", (cid,))
            rows.execute(
                "insert into tokens (hash, cid, expires_s) values (?, ?, ?)",
                (_hash(token), cid, now_s + TOKEN_LIFETIME_HOURS * 3600),
            )
        return token

    def withdraw(self, cid: str, *, bound: bool = False) -> bool:
        """Delete the unused token of a device, and what is `bound` to a key as well; False where there is none."""
        if not self.path.exists():
            return False
        with self._open() as rows:
            gone = rows.execute("delete from tokens where cid = ? and (key is null or ?)", (cid, bound))
            return gone.rowcount > 0

    def redeem(self, token: str, cid: str, key: bytes, now_s: float) -> float:
        """Use a token for a device; -> the time of its first use. Raises TokenRefused.

        `key`: the public key [DER] of the signing request.
        """
        used, wants = _hash(token), hashlib.sha256(key).hexdigest()
        with self._open() as rows:
            found = rows.execute("select cid, expires_s from tokens where hash = ?", (used,)).fetchone()
            if found is None or found[0] != cid:
                raise TokenRefused("unknown", f"this token was never made for {cid}")
            if now_s > found[1]:
                raise TokenRefused("expired", f"the token of {cid} is older than {TOKEN_LIFETIME_HOURS:g} hours")
            rows.execute("update tokens set key = ?, used_s = ? where hash = ? and key is null", (wants, now_s, used))
            mine, used_s = rows.execute("select key = ?, used_s from tokens where hash = ?", (wants, used)).fetchone()
            if not mine:
                rows.execute("update tokens set refused = refused + 1 where hash = ?", (used,))
        if not mine:
            raise TokenRefused("used", f"the token of {cid} was used before, with another key")
        return float(used_s)

    def is_open(self, token: str, now_s: float) -> bool:
        with self._open() as rows:
            query = "select 1 from tokens where hash = ? and key is null and expires_s >= ?"
            return rows.execute(query, (_hash(token), now_s)).fetchone() is not None

    def states(self) -> list[TokenState]:
        if not self.path.exists():
            return []
        query = "select cid, expires_s, key is not null, refused from tokens order by cid, expires_s"
        with self._open() as rows:
            found = rows.execute(query).fetchall()
        return [TokenState(cid=c, expires_s=e, used=bool(u), refused=r) for c, e, u, r in found]

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """One transaction; other processes wait for its end. Raises ConfigError for a damaged file, OSError else."""
        try:
            with closing(sqlite3.connect(self.path, timeout=30, isolation_level=None)) as database:
                database.execute("begin immediate")
                database.execute(TOKENS_SCHEMA)
                yield database
                database.execute("commit")
        except sqlite3.OperationalError as wrong:  # a full disk, no rights
            raise OSError(f"{self.path}: {wrong}") from wrong
        except sqlite3.DatabaseError as wrong:
            hint = "remove it: the tokens that wait are void then, and --token makes new ones"
            raise ConfigError(f"{self.path} is damaged ({wrong})", hint=hint) from wrong


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
