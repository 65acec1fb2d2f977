"""Key files, who is let in, and where an engine may listen."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers_cli import Cli, cli, one_line
from helpers_keys import key_dir
from zmq.utils import z85

from actorium.actors.config.tree import Config, RuntimeConfig
from actorium.actors.config.validation import validate
from actorium.actors.errors import BadConfig
from actorium.actors.runtime.security import curve_keys as keys
from actorium.actors.runtime.security.endpoints import Endpoint, parse

__all__ = ["cli"]
STRANGER = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"


two_users = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to act as another user")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_key_files_are_private_and_whole(tmp_path: Path) -> None:
    where = key_dir(tmp_path, "ann")
    server, client = keys.read_server(where), keys.read_pair(tmp_path / "ann.key")
    assert mode(where) == 0o700 and mode(where / keys.SERVER_KEY) == 0o600
    assert mode(tmp_path / "ann.key") == mode(where / keys.CLIENTS) == 0o600
    assert client.server == server.public and client.public != server.public
    assert len({server.secret, server.public, client.secret, client.public}) == 4
    assert keys.clients(where) == {"ann": client.public}
    assert server.secret not in repr(server)
    assert not list(where.glob(".*"))


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    where = key_dir(tmp_path, "ann")
    before = (where / keys.SERVER_KEY).read_bytes(), (tmp_path / "ann.key").read_bytes()
    with pytest.raises(BadConfig, match="exists"):
        keys.make_server(where)
    with pytest.raises(BadConfig, match="'ann' is let in already"):
        keys.make_client(where, "ann", tmp_path / "other.key")
    with pytest.raises(BadConfig, match=r"ann\.key exists already"):
        keys.make_client(where, "bob", tmp_path / "ann.key")
    assert keys.clients(where).keys() == {"ann"}
    assert before == ((where / keys.SERVER_KEY).read_bytes(), (tmp_path / "ann.key").read_bytes())
    assert keys.make_server(where, replace=True) != keys.read_pair(tmp_path / "ann.key")


@pytest.mark.parametrize("name", ["", "a b", "-x", "a\n", "a/b", "x" * 65, "ä"])
def test_bad_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadConfig, match="no name for a client"):
        keys.authorise(key_dir(tmp_path), name, STRANGER)


@pytest.mark.parametrize("public", ["", "x" * 39, "x" * 41, "'" * 40, "x" * 39 + "\n"])
def test_bad_public_keys_are_refused(tmp_path: Path, public: str) -> None:
    with pytest.raises(BadConfig, match="no public key"):
        keys.authorise(key_dir(tmp_path), "ann", public)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b'{"public": "x", "secret": "y"}'])
def test_a_file_that_is_no_key(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.key"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(BadConfig, match=r"a\.key is no key file"):
        keys.read_pair(path)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    key_dir(tmp_path, "ann")
    (tmp_path / "ann.key").chmod(0o640)
    with pytest.raises(BadConfig, match=r"others can read .*ann\.key"):
        keys.read_pair(tmp_path / "ann.key")


def test_the_list_follows_its_file(tmp_path: Path) -> None:
    where = key_dir(tmp_path, "ann")
    public = keys.clients(where)["ann"]
    allowed = keys.AllowList(where)
    assert allowed.name_of(public) == "ann" and allowed.name_of(STRANGER) is None
    keys.authorise(where, "bob", STRANGER)
    assert allowed.name_of(STRANGER) == "bob" and allowed.name_of(public) == "ann"
    keys.revoke(where, "ann")
    assert allowed.name_of(public) is None and allowed.name_of(STRANGER) == "bob"
    (where / keys.CLIENTS).write_text("one two three\nbob\n" + z85.encode(bytes(32)).decode())
    assert allowed.name_of(STRANGER) is None
    (where / keys.CLIENTS).unlink()
    assert allowed.name_of(STRANGER) is None
    with pytest.raises(BadConfig, match="no client named 'ann'"):
        keys.revoke(where, "ann")


@pytest.mark.parametrize(("spoil", "why"), [
    (lambda where: (where / keys.CLIENTS).chmod(0o606), "others could change"),
    (lambda where: (where / keys.CLIENTS).chmod(0o620), "others could change"),
    (lambda where: where.chmod(0o777), "others could replace"),
    pytest.param(lambda where: os.chown(where / keys.CLIENTS, 65534, -1), "another user (uid 65534",
                 marks=two_users),
    pytest.param(lambda where: (os.rename(where / keys.CLIENTS, where / "x"),
                                os.symlink("x", where / keys.CLIENTS),
                                os.lchown(where / keys.CLIENTS, 65534, -1)), "symbolic link",
                 marks=two_users)])
def test_a_list_that_others_could_change_lets_nobody_in(
        tmp_path: Path, spoil: Callable[[Path], Any], why: str, caplog: pytest.LogCaptureFixture
        ) -> None:
    where = key_dir(tmp_path, "ann")
    public = keys.clients(where)["ann"]
    allowed = keys.AllowList(where)
    assert allowed.name_of(public) == "ann"
    spoil(where)
    assert allowed.name_of(public) is None
    assert allowed.name_of(public) is None
    assert [why in record.getMessage() for record in caplog.records] == [True]
    with pytest.raises(BadConfig, match=re.escape(why)):
        keys.clients(where)


def test_a_key_that_others_could_change_is_refused(tmp_path: Path) -> None:
    key_dir(tmp_path, "ann")
    (tmp_path / "ann.key").chmod(0o602)
    with pytest.raises(BadConfig, match=r"others could change .*ann\.key"):
        keys.read_pair(tmp_path / "ann.key")


def test_a_list_may_be_a_link_as_in_a_mounted_secret(tmp_path: Path) -> None:
    """Kubernetes swaps a directory of links, in one that has the sticky bit."""
    where = key_dir(tmp_path, "ann")
    public = keys.clients(where)["ann"]
    (where / "..1").mkdir(mode=0o755)
    (where / keys.CLIENTS).rename(where / "..1" / keys.CLIENTS)
    (where / "..data").symlink_to("..1")
    (where / keys.CLIENTS).symlink_to(f"..data/{keys.CLIENTS}")
    where.chmod(0o1777)
    assert keys.AllowList(where).name_of(public) == "ann"


def test_many_may_write_the_list_at_once(tmp_path: Path) -> None:
    where = key_dir(tmp_path)
    names = [f"client{i}" for i in range(12)]
    threads = [threading.Thread(target=keys.authorise, args=(where, name, STRANGER))
               for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(keys.clients(where)) == sorted(names)


@pytest.mark.parametrize(("text", "host", "port"), [
    ("tcp://10.0.0.1:5000", "10.0.0.1", 5000), ("tcp://*:1", "*", 1),
    ("tcp://[::1]:65532", "[::1]", 65532), ("tcp://localhost:80", "127.0.0.1", 80)])
def test_addresses(text: str, host: str, port: int) -> None:
    found = parse(text)
    assert found == Endpoint(host, port)
    assert found.address("watchdog") == f"tcp://{host}:{port + 2}"


@pytest.mark.parametrize("text", [
    "", "tcp://", "tcp://host", "tcp://:1", "tcp://h:", "h:1", "udp://h:1", "tcp://::1:5",
    "tcp://h:x", "tcp://h:0", "tcp://h:65534", "tcp://h:-1", "tcp://h:1/x/y:2"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(BadConfig, match="^listen: "):
        validate(Config(runtime=RuntimeConfig(listen=text)))


def test_the_command(cli: Cli, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        done = cli.run("keys", *words, ACTORIUM_KEYS_DIR=str(tmp_path / "k"))
        assert done.returncode == 0, done.stderr
        return done.stdout.decode()

    server = run("server").split()[-1]
    run("client", "ann", "--out", str(tmp_path / "ann.key"))
    ann = keys.read_pair(tmp_path / "ann.key")
    assert ann.server == server
    told = run("client", "bob", "--server", server, "--out", str(tmp_path / "bob.key"))
    bob = keys.read_pair(tmp_path / "bob.key")
    assert bob.public in told and bob.server == server
    assert run("list").splitlines() == [f"server: {server}", f"ann: {ann.public}"]
    run("authorise", "bob", bob.public)
    run("revoke", "ann")
    assert run("list").splitlines() == [f"server: {server}", f"bob: {bob.public}"]


@pytest.mark.parametrize(("words", "text"), [
    ((), "do what?"), (("serve",), "no such action (did you mean server?)"),
    (("revoke",), "takes a NAME, got nothing"), (("list",), "no server key in"),
    (("client", "ann"), "no server key in"), (("authorise", "a", "b"), "no public key")])
def test_a_bad_command_is_one_line(cli: Cli, tmp_path: Path, words: tuple[str, ...],
                                   text: str) -> None:
    done = cli.run("keys", *words, ACTORIUM_KEYS_DIR=str(tmp_path))
    assert done.returncode == 2
    assert text in one_line(done.stderr)


def test_serve_will_not_listen_without_a_key(cli: Cli, tmp_path: Path) -> None:
    done = cli.run("serve", "--null-worker", "--skip-tokenizer", "--listen", "tcp://127.0.0.1:5000",
                   "--keys-dir", str(tmp_path))
    assert done.returncode == 2
    assert "no server key in" in one_line(done.stderr)
    assert "actorium keys server" in one_line(done.stderr)
    assert cli.entries() == []
