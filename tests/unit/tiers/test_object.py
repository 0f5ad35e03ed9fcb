"""Object stores: a real server of each kind, and everything that goes wrong between it and us."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from typer.testing import CliRunner

from everstep.cli import app
from everstep.errors import (
    DeadlineError,
    EverstepError,
    OptionError,
    PermissionDeniedError,
    StorageError,
    UnavailableError,
    UnreachableError,
)
from everstep.seams import PosixFileSystem
from everstep.testing import conformance as checks
from everstep.testing.conformance import CHECKS, Place, conformance, walk
from everstep.tiers import object as object_module
from everstep.tiers.contract import read_whole
from everstep.tiers.memory import MemoryFile
from everstep.tiers.object import ObjectTier, translate_error
from everstep.tiers.options import open_tier
from everstep.tiers.retry import RetryingTier, RetryPolicy
from tests.support.copying import train
from tests.support.inside.dying import die
from tests.support.objectstore import KEY, SECRET, FaultProxy
from tests.support.stores import BUCKET, KINDS, Store, serve, skip_reason

pytest.importorskip("obstore")

PART_BYTES = 5 << 20
NOBODY = "http://127.0.0.1:9"
of_s3 = pytest.mark.parametrize("store", ["s3"], indirect=True)
slow_but_s3 = [
    pytest.param(kind, marks=[] if kind == "s3" else [pytest.mark.slow]) for kind in KINDS
]


@pytest.fixture(scope="module", params=slow_but_s3)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A real server of each kind."""
    kind = request.param
    if reason := skip_reason(kind):
        pytest.skip(reason)
    with serve(kind, tmp_path_factory.mktemp(kind)) as served:
        yield served


@pytest.fixture
def proxy(store: Store) -> Iterator[FaultProxy]:
    with FaultProxy(store.server) as between:
        yield between


@pytest.fixture
def disturbed(store: Store, proxy: FaultProxy) -> Store:
    """The server as it is reached through the proxy."""
    return Store(store.kind, proxy.url)


def tier_at(store: Store, **more: Any) -> ObjectTier:
    settings = {"part_bytes": PART_BYTES, "timeout_s": 30.0, "options": store.options(), **more}
    return ObjectTier(f"{store.url}/a/b", **settings)


def retrying(tier: ObjectTier) -> RetryingTier:
    return RetryingTier(tier, RetryPolicy(first_s=0.001), seed=1)


def source(data: bytes) -> MemoryFile:
    return MemoryFile([memoryview(data)])


def read(tier: Any, name: str) -> bytes:
    return read_whole(tier.open(name), name)


# --- The contract -----------------------------------------------------------------------


# One test for all checks: a server is dear, and tests that share the work would each start one.


@pytest.mark.slow
def test_contract(store: Store) -> None:
    results = conformance(Place(lambda: tier_at(store), large_bytes=2 * PART_BYTES + 1))
    assert not [str(result) for result in results if result.problem]
    assert len(results) == len(CHECKS)


@pytest.mark.slow
def test_contract_behind_faults(proxy: FaultProxy, disturbed: Store) -> None:
    """Every third request or so fails in some way; the client's own retries are part of it."""
    place = Place(lambda: retrying(tier_at(disturbed)), large_bytes=2 * PART_BYTES + 1)
    for check in (
        checks.what_is_put_is_read,
        checks.large_objects_come_back_whole,
        checks.a_source_that_breaks_leaves_nothing,
        checks.create_keeps_what_is_there,
        checks.of_many_at_once_one_creates,
        checks.listings_show_what_is_there,
        checks.what_is_deleted_is_gone,
    ):
        proxy.faults = [
            ("PUT", "500"),
            ("PUT", ""),
            ("PUT", "500 after"),
            ("PUT", ""),
            ("GET", "cut"),
            ("GET", ""),
            ("GET", "500"),
            ("HEAD", "500"),
            ("HEAD", ""),
            ("DELETE", "500 after"),
            ("POST", "500"),
            ("POST", "500 after"),
        ]
        check(place)
    assert len(proxy.seen) > 150


def test_large_objects_go_in_parts(proxy: FaultProxy, disturbed: Store) -> None:
    tier = tier_at(disturbed)
    tier.put("parts", source(bytes(3 * PART_BYTES + 1)))
    parts = [line for line in proxy.seen if re.match(r"PUT .*\b(partNumber=|comp=block&)", line)]
    assert len(parts) == 4
    assert tier.open("parts").size_bytes == 3 * PART_BYTES + 1


def test_only_what_is_asked_for_is_read(proxy: FaultProxy, disturbed: Store) -> None:
    tier = tier_at(disturbed)
    tier.put("ranges", source(bytes(range(256)) * 4096))
    file = tier.open("ranges")
    proxy.seen.clear()
    buffer = bytearray(4)
    assert file.read_into(memoryview(buffer), 254) == 4
    assert bytes(buffer) == bytes([254, 255, 0, 1])
    (request,) = map(unquote, proxy.seen)
    assert request.startswith("GET ")
    assert request.endswith(f"/{BUCKET}/a/b/ranges")


def test_a_reader_of_a_replaced_object_is_told(store: Store) -> None:
    tier = tier_at(store)
    tier.put("replaced", source(b"first"))
    file = tier.open("replaced")
    tier.put("replaced", source(b"other"))
    with pytest.raises(StorageError, match="replaced during the operation"):
        file.read_into(memoryview(bytearray(5)), 0)
    tier.delete("replaced")
    with pytest.raises(
        StorageError, match=r"deleted during the read|replaced during the operation"
    ):
        file.read_into(memoryview(bytearray(5)), 0)


# --- What goes wrong --------------------------------------------------------------------


def test_an_answer_that_was_lost(proxy: FaultProxy, disturbed: Store) -> None:
    """The record is there, the answer was an error: it was we who created it."""
    tier = retrying(tier_at(disturbed))
    proxy.faults = [("PUT", "500 after")]
    assert tier.create("lost-answer", b"ours")
    proxy.faults = [("PUT", "500 after")]
    assert not tier.create("lost-answer", b"theirs")
    assert read(tier, "lost-answer") == b"ours"


def test_a_read_that_is_cut_off(proxy: FaultProxy, disturbed: Store) -> None:
    data = os.urandom(100_000)
    tier = tier_at(disturbed)
    tier.put("cut", source(data))
    proxy.faults = [("GET", "cut")] * 20
    with pytest.raises(UnreachableError):
        read(tier, "cut")
    proxy.faults = [("GET", "cut")] * 2
    assert read(retrying(tier), "cut") == data


def test_a_server_that_does_not_answer(proxy: FaultProxy, disturbed: Store) -> None:
    """Within the stated time, and in words."""
    tier = tier_at(disturbed, timeout_s=0.5)
    proxy.faults = [("HEAD", "hang")] * 20
    with pytest.raises(UnreachableError, match="no reply in time") as caught:
        tier.open("anything")
    assert caught.value.tier == "object"
    assert caught.value.path == f"{disturbed.url}/a/b/anything"
    assert caught.value.hint


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_not_there(kind: str) -> None:
    tier = RetryingTier(
        tier_at(Store(kind, NOBODY), timeout_s=5.0), RetryPolicy(attempts=2, first_s=0.001)
    )
    with pytest.raises(UnreachableError, match=r"no connection \(Connection refused\).*2 attempts"):
        tier.check()


@of_s3
def test_a_deadline_for_everything_together(proxy: FaultProxy, disturbed: Store) -> None:
    tier = RetryingTier(
        tier_at(disturbed), RetryPolicy(attempts=1000, first_s=0.001, deadline_s=0.05)
    )
    proxy.faults = [("HEAD", "500")] * 10_000
    with pytest.raises(DeadlineError, match=r"within 0\.05 s: could not open x: status 500"):
        tier.open("x")


def test_a_bucket_that_is_not_there(store: Store) -> None:
    tier = ObjectTier(f"{store.kind}://no-such-bucket/x", options=store.options())
    with pytest.raises(StorageError, match="no such bucket"):
        tier.check()


WRONG = {
    "s3": {"secret_access_key": "wrong"},
    "gs": {"bearer_token": "wrong"},
    "az": {"account_key": "d3Jvbmc="},
}


def test_wrong_credentials(store: Store) -> None:
    tier = tier_at(store, options=store.options(**WRONG[store.kind]))
    for call in (tier.check, lambda: tier.create("x", b"x"), lambda: tier.delete("x")):
        with pytest.raises(PermissionDeniedError, match="credentials were refused") as caught:
            call()
        assert SECRET not in str(caught.value)


@of_s3
@pytest.mark.parametrize(
    ("fault", "words"), [("expired", "have expired"), ("skewed", "RequestTimeTooSkewed")]
)
def test_refused_credentials(proxy: FaultProxy, disturbed: Store, fault: str, words: str) -> None:
    tier = tier_at(disturbed)
    proxy.faults = [("HEAD", "")] + [("GET", fault)] * 20
    with pytest.raises(PermissionDeniedError, match=words) as caught:
        tier.check()
    assert ("clock" in str(caught.value)) == (fault == "skewed")


@of_s3
def test_credentials_are_fetched_anew(store: Store) -> None:
    """Those that were handed out first have been withdrawn: the next ones do."""
    handed: list[str] = []

    def credentials() -> dict[str, Any]:
        handed.append(SECRET if handed else "withdrawn")
        return {"access_key_id": KEY, "secret_access_key": handed[-1], "expires_at": None}

    where = {"endpoint": store.server, "region": "us-east-1"}
    tier = ObjectTier("s3://runs/a/b", options=where, credentials=credentials)
    with pytest.raises(PermissionDeniedError):
        tier.check()
    assert retrying(tier).create("renewed", b"renewed")
    assert len(handed) == 2


@of_s3
def test_credentials_that_are_wrong_for_good_are_refused_soon(store: Store) -> None:
    asked = []

    def credentials() -> dict[str, Any]:
        asked.append(1)
        return {"access_key_id": KEY, "secret_access_key": "wrong", "expires_at": None}

    where = {"endpoint": store.server, "region": "us-east-1"}
    tier = ObjectTier("s3://runs/a/b", options=where, credentials=credentials)
    with pytest.raises(PermissionDeniedError, match="SignatureDoesNotMatch"):
        retrying(tier).check()
    assert 1 < len(asked) <= 3


# --- Secrets ----------------------------------------------------------------------------


def test_no_error_shows_a_secret(
    proxy: FaultProxy, disturbed: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The server's answer repeats key and token: neither message, cause nor log has them."""
    caplog.set_level(0)
    tier = retrying(tier_at(disturbed))
    calls = [
        lambda: tier.check(),
        lambda: tier.scan(),
        lambda: tier.open("x"),
        lambda: tier.put("x", source(b"x")),
        lambda: tier.create("y", b"x"),
        lambda: tier.put("z", source(bytes(PART_BYTES + 1))),
        lambda: tier.delete("x"),
    ]
    for call in calls:
        methods = ("GET", "HEAD", "PUT", "POST", "DELETE")
        proxy.faults = [(method, "secret") for method in methods] * 20
        with pytest.raises(StorageError) as caught:
            call()
        seen: BaseException | None = caught.value
        shown = "".join(traceback.format_exception(caught.value)) + str(caught.value.fields())
        while seen is not None:
            shown += repr(seen) + str(seen)
            seen = seen.__cause__ or seen.__context__
        assert SECRET not in shown
        assert KEY not in shown
    assert SECRET not in caplog.text
    assert SECRET not in repr(tier) + repr(tier_at(disturbed)) + tier.url


def test_a_tier_is_not_pickled() -> None:
    with pytest.raises(TypeError, match="holds credentials"):
        pickle.dumps(tier_at(Store("s3", NOBODY)))


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret-text@bucket/x",
        "s3://bucket/x?X-Amz-Signature=secret-text",
        "s3://b#secret-text",
    ],
)
def test_a_url_with_credentials_is_refused_without_repeating_them(url: str) -> None:
    with pytest.raises(OptionError) as caught:
        ObjectTier(url)
    assert "secret-text" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "http://x/y", "s3:/x", "s3://b/../c", "x"])
def test_what_is_no_store_is_refused(url: str) -> None:
    with pytest.raises(OptionError) as caught:
        ObjectTier(url)
    assert caught.value.hint == "use a URL like s3://bucket/prefix"


def test_a_scheme_that_is_no_store_is_named_and_nothing_else_of_its_url() -> None:
    with pytest.raises(OptionError, match=r"'s4://'.*s3://, gs://, az://") as caught:
        ObjectTier("s4://key:secret-text@bucket/x")
    assert "secret-text" not in str(caught.value)


def test_a_place_is_a_url_or_an_absolute_path() -> None:
    for where in ("", "relative/path", "a\0b"):
        with pytest.raises(OptionError, match="not a valid place for copies"):
            open_tier(where, PosixFileSystem())
    assert open_tier("/mnt/shared/run", PosixFileSystem()).traits.kind == "disk"


def test_an_option_that_the_store_does_not_know_shows_no_secret() -> None:
    with pytest.raises(OptionError) as caught:
        ObjectTier("s3://b/x", options={"secret_key_of_mine": SECRET})
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_profile_needs_what_reads_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not passed over: other credentials than those that were meant might be found."""
    real = object_module.importlib.import_module

    def missing(name: str) -> Any:
        if name == "obstore.auth.boto3":
            raise ImportError(name)
        return real(name)

    monkeypatch.setenv("AWS_PROFILE", "mine")
    monkeypatch.setattr(object_module.importlib, "import_module", missing)
    with pytest.raises(OptionError, match="boto3"):
        ObjectTier("s3://b/x")


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_library_it_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(object_module.importlib, "import_module", missing)
    with pytest.raises(UnavailableError, match="obstore") as caught:
        ObjectTier(f"{kind}://b/x")
    assert caught.value.hint == "pip install 'everstep[cloud]'"


@of_s3
def test_a_forked_child_is_refused_and_does_not_hang(store: Store) -> None:
    tier = tier_at(store)
    tier.check()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            tier.check()
            os.write(writing, b"no error")
        except UnavailableError:
            os.write(writing, b"refused")
        finally:
            die()
    os.close(writing)
    _, status = os.waitpid(child, 0)
    assert os.read(reading, 100) == b"refused"
    os.close(reading)
    assert status == 0


# --- A run whose copies are in a store --------------------------------------------------


@pytest.fixture
def place(store: Store, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a place of its own, with what reaches it in the environment."""
    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)
    return f"{store.url}/job-{uuid.uuid4().hex[:8]}/run"


def test_a_machine_that_lost_its_disk_goes_on_from_the_store(
    place: str, run_folder: Path, tmp_path: Path
) -> None:
    """Trainer and keeper as processes, a real server, bit for bit; and the command reads it."""
    expected, _, _ = train(tmp_path / "whole", 8)
    train(run_folder, 5, tiers=[place])
    shutil.rmtree(run_folder)
    listed = everstep_command("ls", place, "--json")
    assert max(base["step"] for base in listed["bases"]) == 4
    verified = everstep_command("verify", place, "--json")
    assert verified["ok"]
    assert {base["read"] for base in verified["bases"]} == {True}
    restored = everstep_command("restore", place, "--step=4", f"--out={tmp_path / 'out'}", "--json")
    assert restored["step"] == 4
    weight, recovery, _ = train(run_folder, 8, tiers=[place])
    assert (recovery.step, recovery.source, recovery.exact) == (4, "object", True)
    assert torch.equal(weight, expected)
    again, recovery, _ = train(tmp_path / "out", 8)
    assert (recovery.step, recovery.source) == (4, "disk")
    assert torch.equal(again, expected)


def test_a_flipped_bit_in_the_store_is_found(place: str, run_folder: Path) -> None:
    train(run_folder, 2, tiers=[place])
    shutil.rmtree(run_folder)
    tier = open_tier(place, PosixFileSystem())
    (name,) = [item.name for item in walk(tier) if item.name.endswith(".safetensors")]
    data = bytearray(read(tier, name))
    data[-1] ^= 1
    tier.put(name, source(bytes(data)))
    found = everstep_command("verify", place, "--json", status=1)
    assert not found["ok"]
    with pytest.raises(EverstepError, match="none can be used"):
        train(run_folder, 4, tiers=[place])


@pytest.mark.parametrize("kind", slow_but_s3)
def test_a_store_that_is_not_there_is_said_at_once(
    kind: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = Store(kind, NOBODY)
    for name, value in nobody.environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnreachableError, match="Connection refused") as caught:
        train(run_folder, 2, tiers=[nobody.url])
    assert nobody.url in str(caught.value)


def everstep_command(*words: str, status: int = 0) -> Any:
    ended = CliRunner().invoke(app, list(words))
    assert ended.exit_code == status, ended.output
    return json.loads(ended.stdout)


# --- Words ------------------------------------------------------------------------------


class GenericError(Exception): ...


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("status code: 503 Slow <Code>SlowDown</Code>", UnreachableError, "status 503 SlowDown"),
        ("status code: 429 Many", UnreachableError, "status 429"),
        ("status code: 409 x <Code>ConditionalRequestConflict</Code>", UnreachableError, "409"),
        ("status code: 507 Full", StorageError, "507"),
        ("status code: 400 x <Code>EntityTooLarge</Code>", StorageError, "EntityTooLarge"),
        ('kind: Connect, message: "No route to host"', UnreachableError, "No route to host"),
        ("kind: Decode", UnreachableError, "cut off"),
        ("error of http://169.254.169.254/latest", PermissionDeniedError, "no credentials"),
        ("Bulk delete failed for key x: Busy (code: 503)", UnreachableError, "status 503"),
        ("failed for key x: Denied (code: AccessDenied)", PermissionDeniedError, "AccessDenied"),
        ("Bulk delete failed: Denied (code: 403)", PermissionDeniedError, "status 403"),
        ("<Code><script>secret</script></Code>", UnreachableError, "the request failed"),
    ],
)
def test_what_a_client_says(text: str, kind: type[Exception], words: str) -> None:
    error = translate_error(GenericError(text), "read x", "s3://b/x")
    assert isinstance(error, kind)
    assert words in str(error)
    assert "secret" not in str(error)
