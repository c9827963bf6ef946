"""Where sockets listen, and for whom."""

import tempfile
from pathlib import Path

import pytest
import zmq

from partc.runtime.errors import BadUsage
from partc.runtime.supervision.supervisor import Supervisor
from partc.runtime.transports import locked_sockets
from partc.runtime.transports.locked_sockets import KEY_FILE, own_address, own_key, read_key, socket_folder


def test_an_address_that_ssh_would_take_for_an_option_is_refused() -> None:
    with pytest.raises(BadUsage, match="no address: '-oProxyCommand=x'"):
        own_address("-oProxyCommand=x")


def test_a_job_has_one_key_that_this_user_alone_reads(tmp_path: Path) -> None:
    first = own_key(tmp_path)

    assert own_key(tmp_path) == first == read_key(tmp_path)
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600


def test_sockets_listen_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")

    with socket_folder() as folder:
        assert folder.parent == Path("/dev/shm")
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


@pytest.fixture
def long_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / ("a" * 150)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.usefixtures("long_temporary_folder")
def test_sockets_listen_elsewhere_if_the_temporary_folder_has_a_long_path(tmp_path: Path) -> None:
    with socket_folder() as folder:
        assert len(str(folder / "supervisor")) <= zmq.IPC_PATH_MAX_LEN
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    with Supervisor({"rank 0": "alpha"}, {}, tmp_path, None):
        pass


@pytest.mark.usefixtures("long_temporary_folder")
def test_a_path_too_long_for_sockets_is_refused_where_no_other_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(locked_sockets, "_SHORT_FOLDERS", ("/nowhere", "/nowhere/else"))

    with pytest.raises(BadUsage, match="too long for sockets"), socket_folder():
        pass
