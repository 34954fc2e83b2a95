"""API keys and the limits of their tenants. Only a key's sha256 is kept; docs/keys.md is for users."""

from __future__ import annotations

import difflib
import hashlib
import hmac
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chairlift.core.errors import SettingsError
from chairlift.openai.options import LONGEST

VARIABLE = "CHAIRLIFT_API_KEYS"
FLAG = "--api-key"
DEFAULT = "default"  # the tenant of keys without a tenant
SHORTEST_KEY = 8
_LOWEST = {"max_concurrent": 1, "tokens_per_minute": 1, "max_priority": 0}
_WEIGHTS = 0.001, 1000.0
_KNOWN = ("key", "sha256", "tenant", "admin", *_LOWEST, "weight", "ttft")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[!-~]+")  # printable ASCII without spaces, as a header can carry it
_TIME = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s)")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_FIELD = re.compile(r"[A-Za-z_]{1,32}")
_POSITION = re.compile(r"\(at [a-z0-9, ]+\)$")


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of API keys: its limits (None is no limit), and its weight and target for scheduling."""

    name: str
    is_admin: bool = False
    max_concurrent: int | None = None
    tokens_per_minute: int | None = None
    max_priority: int | None = None
    weight: float = 1.0  # share of service under the fair policy, relative to other tenants
    ttft: float | None = None  # target in seconds to the first token, under the deadline policy

    @property
    def limits(self) -> tuple[float | None, ...]:
        """The fields that must be equal in all keys of a tenant."""
        return self.max_concurrent, self.tokens_per_minute, self.max_priority, self.weight, self.ttft


@dataclass(frozen=True, slots=True)
class _Entry:
    place: str  # the only text that messages quote: any field could hold a key by mistake
    digest: bytes = field(repr=False)
    tenant: Tenant


@dataclass(frozen=True, slots=True)
class Keyring:
    """All valid API keys."""

    entries: tuple[_Entry, ...]
    warnings: tuple[str, ...] = ()

    @staticmethod
    def read(file: Path | None, environment: Mapping[str, str], digest: str | None = None) -> Keyring | None:
        """Read the keys of a file, of CHAIRLIFT_API_KEYS and of --api-key; None, if none is given, needs no key.

        `digest` is the sha256 of --api-key; its tenant is `default`, with admin rights.

        >>> Keyring.read(None, {"CHAIRLIFT_API_KEYS": "alice:sk-12345678"}).find("Bearer sk-12345678").name
        'alice'
        """
        if file is None and VARIABLE not in environment and digest is None:
            return None
        entries: list[_Entry] = []
        warnings: list[str] = []
        if file is not None:
            text = _read_file(file, warnings)
            entries += _file_entries(file, text)
        if VARIABLE in environment:
            entries += _environment_entries(environment[VARIABLE])
        if digest is not None:
            entries.append(_Entry(FLAG, bytes.fromhex(digest), Tenant(DEFAULT, is_admin=True)))
        _check_together(entries)
        return Keyring(tuple(entries), tuple(warnings))

    def find(self, authorization: str | None) -> Tenant | None:
        """Return the tenant of the key in an Authorization header, or None if the key is not valid."""
        scheme, _, offered = (authorization or "").strip().partition(" ")
        return self.find_key(offered) if scheme.lower() == "bearer" else None

    def find_key(self, offered: str | None) -> Tenant | None:
        """Return the tenant of a key, or None if the key is not valid."""
        offered = (offered or "").strip()
        if not offered:
            return None
        digest = hashlib.sha256(offered.encode("utf-8", "surrogatepass")).digest()
        found = None
        for entry in self.entries:  # no early exit: the time taken must not reveal which key matched
            if hmac.compare_digest(entry.digest, digest):
                found = entry.tenant
        return found


def digest_of(key: str) -> str:
    """Return the sha256 of --api-key: the key itself is passed to no other process."""
    return _digest(FLAG, key).hex()


def _read_file(file: Path, warnings: list[str]) -> bytes:
    try:
        with file.open("rb") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            text = opened.read()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SettingsError(f"the key file {file} cannot be read: {reason}; check its path and permissions") from None
    if mode & 0o077:
        warnings.append(f"the key file {file} is open to other users (mode {mode:o}): run chmod 600 on it")
    return text


def _file_entries(file: Path, text: bytes) -> list[_Entry]:
    try:
        parsed = tomllib.loads(text.decode())
    except UnicodeDecodeError:
        raise SettingsError(f"the key file {file} is not UTF-8: save it as UTF-8") from None
    except (ValueError, RecursionError) as error:
        position = _POSITION.search(str(error))  # the rest of the message may quote the file
        where = f" {position[0]}" if position else ""
        raise SettingsError(f"the key file {file} is not valid TOML{where}: correct it there") from None
    tables = parsed.pop("key", [])
    if parsed:
        raise SettingsError(f"the key file {file} has more than [[key]] entries: put each field below a [[key]]")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise SettingsError(f"the key file {file} has a key that is not a table: use [[key]] in two brackets")
    if not tables:
        raise SettingsError(f"the key file {file} has no keys: add a [[key]] with a key and a tenant, or leave it out")
    return [_file_entry(f"[[key]] {number} of {file}", table) for number, table in enumerate(tables, 1)]


def _file_entry(place: str, table: dict[str, Any]) -> _Entry:
    for name in table.keys() - set(_KNOWN):
        close = difflib.get_close_matches(name, _KNOWN, n=1)
        shown = f"the unknown field {name}" if close and _FIELD.fullmatch(name) else "an unknown field"
        raise SettingsError(f"{place} has {shown}: " + (f"did you mean {close[0]}?" if close else f"use {_known()}"))
    if ("key" in table) == ("sha256" in table):
        raise SettingsError(f"{place} must have either key or sha256, and not both")
    if "tenant" not in table:
        raise SettingsError(f'{place} has no tenant: add tenant = "name"')
    is_admin = table.get("admin", False)
    if not isinstance(is_admin, bool):
        raise SettingsError(f"{place} has an admin that is not a boolean: use true or false")
    limits: dict[str, Any] = {name: _limit(place, name, table[name]) for name in _LOWEST if name in table}
    if "weight" in table:
        limits["weight"] = _weight(place, table["weight"])
    if "ttft" in table:
        limits["ttft"] = _seconds(place, table["ttft"])
    digest = _digest(place, table["key"]) if "key" in table else _hex_digest(place, table["sha256"])
    return _Entry(place, digest, Tenant(_name(place, table["tenant"]), is_admin, **limits))


def _environment_entries(text: str) -> list[_Entry]:
    # An empty variable is most likely a missing secret: serving without keys would then be unsafe.
    if not text.strip():
        raise SettingsError(f"{VARIABLE} is empty: give tenant:key, or unset it to serve without keys")
    entries = []
    for number, each in enumerate(text.split(","), 1):
        place = f"entry {number} of {VARIABLE}"
        parts = each.strip().split(":")
        if len(parts) > 3 or parts[2:] not in ([], ["admin"]):
            raise SettingsError(
                f"{place} has too many colons: use tenant:key, or tenant:key:admin for an administrator"
            )
        name, key = parts[:2] if len(parts) > 1 else (DEFAULT, parts[0])
        tenant = Tenant(_name(place, name), is_admin=len(parts) == 3)
        entries.append(_Entry(place, _digest(place, key), tenant))
    return entries


def _name(place: str, name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SettingsError(f"{place} has a bad tenant: use 1 to 64 letters, digits, dots, dashes and underscores")
    if name.startswith("sk-"):  # tenants are shown in logs and metrics
        raise SettingsError(f"{place} has a tenant that looks like a key: the tenant comes first, then its key")
    return name


def _digest(place: str, key: Any) -> bytes:
    if not isinstance(key, str) or len(key) < SHORTEST_KEY:
        raise SettingsError(f"{place} has a key that is too short: use a string of {SHORTEST_KEY} characters or more")
    if not _KEY.fullmatch(key):
        raise SettingsError(f"{place} has a key that no header can carry: use printable ASCII without spaces")
    return hashlib.sha256(key.encode()).digest()


def _hex_digest(place: str, text: Any) -> bytes:
    if not isinstance(text, str) or not _DIGEST.fullmatch(text):
        raise SettingsError(f"{place} has an invalid sha256: use 64 hexadecimal digits")
    return bytes.fromhex(text)


def _limit(place: str, name: str, value: Any) -> int:
    lowest = _LOWEST[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise SettingsError(f"{place} has a {name} that is not a whole number: use {lowest} or more, or leave it out")
    if value < lowest:
        raise SettingsError(f"{place} has {name} = {value}: use {lowest} or more, or leave it out")
    return value


def _weight(place: str, value: Any) -> float:
    lowest, highest = _WEIGHTS
    allowed = f"use {lowest:g} to {highest:g}, or leave it out"
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise SettingsError(f"{place} has a weight that is not a number: {allowed}")
    if not lowest <= value <= highest:
        raise SettingsError(f"{place} has weight = {value}: {allowed}")
    return float(value)


def _seconds(place: str, value: Any) -> float:
    allowed = 'use one such as "500ms", "2s" or 0.5 (seconds), or leave it out'
    if isinstance(value, str) and (found := _TIME.fullmatch(value)):
        value = float(found[1]) / (1000 if found[2] == "ms" else 1)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise SettingsError(f"{place} has a ttft that is not a time: {allowed}")
    if not 0 < value <= LONGEST:
        raise SettingsError(f"{place} has ttft = {value} s: it must be above 0 and up to {LONGEST:.0f}; {allowed}")
    return float(value)


def _check_together(entries: list[_Entry]) -> None:
    by_digest: dict[bytes, _Entry] = {}
    by_name: dict[str, _Entry] = {}
    for entry in entries:
        same_key = by_digest.setdefault(entry.digest, entry)
        if same_key is not entry:
            raise SettingsError(f"{same_key.place} and {entry.place} have the same key: remove one")
        same_name = by_name.setdefault(entry.tenant.name, entry)
        if same_name.tenant.limits != entry.tenant.limits:
            raise SettingsError(
                f"{same_name.place} and {entry.place} have the same tenant but different limits: make them equal"
            )


def _known() -> str:
    return f"{', '.join(_KNOWN[:-1])} or {_KNOWN[-1]}"
