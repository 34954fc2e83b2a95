"""API keys from a file and from the environment, and every mistake one can make in writing them."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.core.errors import SettingsError
from chairlift.serving.keys import Keyring, Tenant, digest_of

SECRET = "sk-correct-horse"
OTHER = "sk-battery-staple"


def write(folder: Path, text: str | bytes) -> Path:
    file = folder / "keys.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    file.chmod(0o600)
    return file


def entry(fields: str, key: str = SECRET, tenant: str = "alice") -> str:
    return f'[[key]]\nkey = "{key}"\ntenant = "{tenant}"\n{fields}\n'


def of_environment(text: str) -> Keyring:
    found = Keyring.read(None, {"CHAIRLIFT_API_KEYS": text})
    assert found is not None
    return found


def test_without_keys_everything_is_allowed() -> None:
    assert Keyring.read(None, {"OTHER": "x"}) is None


def test_a_file_gives_tenants_with_their_limits(tmp_path: Path) -> None:
    digest = hashlib.sha256(OTHER.encode()).hexdigest().upper()
    limits = "admin = true\nmax_concurrent = 8\ntokens_per_minute = 1000\nmax_priority = 0\nweight = 2.5\nttft = '2s'"
    file = write(tmp_path, entry(limits) + f'[[key]]\nsha256 = "{digest}"\ntenant = "bob"\n')
    ring = Keyring.read(file, {})
    assert ring is not None and ring.warnings == ()
    assert ring.find(f"Bearer {SECRET}") == Tenant("alice", True, 8, 1000, 0, 2.5, 2.0)
    assert ring.find(f"Bearer {OTHER}") == Tenant("bob")


@pytest.mark.parametrize(
    ("written", "seconds"), [('"500ms"', 0.5), ('"2s"', 2.0), ('"0.25s"', 0.25), ("0.5", 0.5), ("3", 3.0)]
)
def test_a_time_has_a_unit_or_is_in_seconds(tmp_path: Path, written: str, seconds: float) -> None:
    ring = Keyring.read(write(tmp_path, entry(f"ttft = {written}")), {})
    assert ring is not None
    assert ring.find(f"Bearer {SECRET}") == Tenant("alice", ttft=seconds)


def test_the_environment_gives_tenants_too(tmp_path: Path) -> None:
    ring = of_environment(f"alice:{SECRET}, {OTHER}")
    assert ring.find(f"Bearer {SECRET}") == Tenant("alice")
    assert ring.find(f"Bearer {OTHER}") == Tenant("default")
    both = Keyring.read(write(tmp_path, entry("")), {"CHAIRLIFT_API_KEYS": OTHER})
    assert both is not None
    assert both.find(f"Bearer {SECRET}") == Tenant("alice")
    assert both.find(f"Bearer {OTHER}") == Tenant("default")


def test_a_key_of_the_environment_may_be_an_administrator_s() -> None:
    ring = of_environment(f"alice:{SECRET}, ops:{OTHER}:admin")
    assert ring.find(f"Bearer {SECRET}") == Tenant("alice")
    assert ring.find(f"Bearer {OTHER}") == Tenant("ops", is_admin=True)


def test_the_flag_gives_one_administrator_beside_the_others(tmp_path: Path) -> None:
    alone = Keyring.read(None, {}, digest_of(SECRET))
    assert alone is not None
    assert alone.find(f"Bearer {SECRET}") == Tenant("default", is_admin=True)
    assert alone.find(f"Bearer {OTHER}") is None
    beside = Keyring.read(write(tmp_path, entry("")), {"CHAIRLIFT_API_KEYS": "sk-of-nobody"}, digest_of(OTHER))
    assert beside is not None
    assert beside.find(f"Bearer {SECRET}") == Tenant("alice")
    assert beside.find("Bearer sk-of-nobody") == Tenant("default")
    assert beside.find(f"Bearer {OTHER}") == Tenant("default", is_admin=True)
    with pytest.raises(SettingsError, match="--api-key have the same key"):
        Keyring.read(write(tmp_path, entry("")), {}, digest_of(SECRET))
    for wrong in ("short", "", "with space"):
        with pytest.raises(SettingsError, match="--api-key has a key that"):
            digest_of(wrong)


@pytest.mark.parametrize("header", [f"Bearer {SECRET}", f"bearer {SECRET}", f"BEARER   {SECRET} ", f" Bearer {SECRET}"])
def test_the_scheme_is_read_as_http_reads_it(header: str) -> None:
    assert of_environment(SECRET).find(header) == Tenant("default")


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        SECRET,
        f"Basic {SECRET}",
        f"Bearer{SECRET}",
        f"Bearer {SECRET}x",
        "Bearer \udc80é",
    ],
)
def test_anything_else_opens_nothing(header: str | None) -> None:
    assert of_environment(SECRET).find(header) is None


RING = of_environment(SECRET)


@given(st.text())
def test_no_header_is_an_error(header: str) -> None:
    assert RING.find(header) is None
    assert RING.find("Bearer " + header) is None


def test_every_digest_is_compared_even_after_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    real = hmac.compare_digest

    def compare(stored: bytes, offered: bytes) -> bool:
        compared.append(stored)
        return real(stored, offered)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    ring = of_environment(f"a:{SECRET},b:{OTHER},c:sk-a-third-one")
    found = ring.find(f"Bearer {SECRET}")
    assert found is not None and found.name == "a"
    assert len(compared) == 3


def test_no_key_is_kept(tmp_path: Path) -> None:
    ring = Keyring.read(write(tmp_path, entry("")), {"CHAIRLIFT_API_KEYS": f"bob:{OTHER}"})
    assert ring is not None
    held = repr(ring) + repr([(each.place, each.digest, each.tenant) for each in ring.entries])
    assert SECRET not in held and OTHER not in held


def test_two_keys_may_share_a_tenant_while_one_replaces_the_other(tmp_path: Path) -> None:
    limit = "max_concurrent = 2"
    ring = Keyring.read(write(tmp_path, entry(limit) + entry(limit + "\nadmin = true", OTHER)), {})
    assert ring is not None
    old, new = ring.find(f"Bearer {SECRET}"), ring.find(f"Bearer {OTHER}")
    assert old is not None and new is not None and old.limits == new.limits
    with pytest.raises(SettingsError, match=r"\[\[key\]\] 1 .* and \[\[key\]\] 2 .* different limits"):
        Keyring.read(write(tmp_path, entry(limit) + entry("max_concurrent = 3", OTHER)), {})
    with pytest.raises(SettingsError, match="different limits"):
        Keyring.read(write(tmp_path, entry("ttft = 1") + entry('ttft = "2s"', OTHER)), {})
    with pytest.raises(SettingsError, match="different limits"):
        Keyring.read(write(tmp_path, entry(limit)), {"CHAIRLIFT_API_KEYS": f"alice:{OTHER}"})


def test_a_file_that_others_can_read_is_worth_a_warning(tmp_path: Path) -> None:
    file = write(tmp_path, entry(""))
    for mode in (0o644, 0o640, 0o602):
        file.chmod(mode)
        ring = Keyring.read(file, {})
        assert ring is not None
        (warning,) = ring.warnings
        assert f"mode {mode:o}" in warning and "chmod 600" in warning


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no keys"),
        ("# nothing yet", "has no keys"),
        ("key = []", "has no keys"),
        (entry("max_concurent = 3"), "unknown field max_concurent: did you mean max_concurrent?"),
        (entry("colour = 3"), "an unknown field: use key, sha256, tenant, admin"),
        (entry(f'{OTHER} = "bob"'), "an unknown field"),
        (entry("max_concurrent = -1"), "max_concurrent = -1: use 1 or more"),
        (entry("max_concurrent = 0"), "max_concurrent = 0: use 1 or more"),
        (entry("tokens_per_minute = -5"), "tokens_per_minute = -5"),
        (entry("max_priority = -1"), "max_priority = -1: use 0 or more"),
        (entry("max_concurrent = 1.5"), "max_concurrent that is not a whole number"),
        (entry("max_concurrent = true"), "max_concurrent that is not a whole number"),
        (entry("admin = 1"), "use true or false"),
        (entry("weight = 0"), "weight = 0: use 0.001 to 1000, or leave it out"),
        (entry("weight = -1.5"), "weight = -1.5: use"),
        (entry("weight = nan"), "weight = nan: use"),
        (entry("weight = inf"), "weight = inf: use"),
        (entry("weight = true"), "a weight that is not a number: use 0.001 to 1000"),
        (entry('weight = "2"'), "a weight that is not a number"),
        (entry("wieght = 2"), "unknown field wieght: did you mean weight?"),
        (entry("ttft = 0"), "ttft = 0 s: it must be above 0"),
        (entry("ttft = -0.5"), "ttft = -0.5 s: it must be above 0"),
        (entry("ttft = nan"), "ttft = nan s: it must be above 0"),
        (entry('ttft = "700000s"'), "ttft = 700000.0 s: it must be above 0 and up to 604800"),
        (entry("ttft = true"), "a ttft that is not a time: use one such as .500ms., .2s. or 0.5"),
        (entry('ttft = "soon"'), "a ttft that is not a time"),
        (entry('ttft = "2 m"'), "a ttft that is not a time"),
        (entry(f'ttft = "{OTHER}"'), "a ttft that is not a time"),
        (entry("weight = 1") + entry("weight = 2", key=OTHER), "the same tenant but different limits"),
        (entry("") + entry("", tenant="bob"), r"1 of .* and \[\[key\]\] 2 of .* have the same key"),
        (entry("", key="sk-1234"), "too short: use a string of 8"),
        (entry("", key="sk-1234 5678"), "no header can carry"),
        (entry("", key="sk-größer-als-7"), "no header can carry"),
        ("[[key]]\nkey = 12345678\ntenant = 'a'", "too short"),
        (entry("", tenant=""), "bad tenant"),
        (entry("", tenant="a b"), "bad tenant"),
        (entry("", tenant=OTHER), "looks like a key"),
        (entry('sha256 = "00"'), "either key or sha256"),
        ('[[key]]\ntenant = "a"', "either key or sha256"),
        ('[[key]]\nsha256 = "00"\ntenant = "a"', "64 hexadecimal digits"),
        (f'[[key]]\nkey = "{SECRET}"', "no tenant"),
        (f'[key]\nkey = "{SECRET}"\ntenant = "a"', "two brackets"),
        (f'key = "{SECRET}"', "two brackets"),
        (f'tenant = "{SECRET}"', "more than"),
        (f'[[key]]\nkey = "{SECRET}\ntenant = "a"', r"not valid TOML \(at line 2, column \d+\)"),
        (f"{SECRET} = {SECRET}", "not valid TOML"),
        (entry("max_concurrent = " + "9" * 5000), "not valid TOML"),
        (b'[[key]]\nkey = "\xff"', "not UTF-8"),
    ],
)
def test_each_mistake_in_a_file_has_its_words(tmp_path: Path, text: str | bytes, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(SettingsError, match=message.replace("?", r"\?")) as caught:
        Keyring.read(file, {})
    assert_tells_no_key(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("sk-1234", "entry 1 of CHAIRLIFT_API_KEYS has a key that is too short"),
        (f"{SECRET},", "entry 2 of CHAIRLIFT_API_KEYS has a key that is too short"),
        (f":{SECRET}", "bad tenant"),
        (f"{SECRET}:bob", "the tenant comes first"),
        (f"alice:{SECRET}:root", "too many colons: use tenant:key, or tenant:key:admin"),
        (f"alice:{SECRET}:admin:admin", "too many colons"),
        (f"a:{SECRET},b:{SECRET}", "entry 1 .* and entry 2 .* have the same key"),
    ],
)
def test_each_mistake_in_the_environment_has_its_words(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        of_environment(text)
    assert_tells_no_key(caught.value)


def test_a_key_of_the_file_may_not_come_again_in_the_environment(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="have the same key"):
        Keyring.read(write(tmp_path, entry("")), {"CHAIRLIFT_API_KEYS": f"alice:{SECRET}"})


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        Keyring.read(tmp_path / "none.toml", {})
    with pytest.raises(SettingsError, match="directory"):
        Keyring.read(tmp_path, {})


def assert_tells_no_key(error: BaseException) -> None:
    told = str(error)
    assert "\n" not in told
    assert not any(secret in told for secret in (SECRET, OTHER, "1234", "horse", "staple"))
    assert error.__cause__ is None and error.__suppress_context__ is (error.__context__ is not None)
