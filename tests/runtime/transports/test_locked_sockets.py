"""Where sockets listen, and for whom."""

from pathlib import Path

import pytest

from partc.runtime.errors import BadUsage
from partc.runtime.transports.locked_sockets import KEY_FILE, own_address, own_key, read_key


def test_an_address_that_ssh_would_take_for_an_option_is_refused() -> None:
    with pytest.raises(BadUsage, match="no address: '-oProxyCommand=x'"):
        own_address("-oProxyCommand=x")


def test_a_job_has_one_key_that_this_user_alone_reads(tmp_path: Path) -> None:
    first = own_key(tmp_path)

    assert own_key(tmp_path) == first == read_key(tmp_path)
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
