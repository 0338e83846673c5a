"""Hosts and slots as given to horovodrun."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.plan.hosts import (
    Host,
    names_of_this_machine,
    parse_discovered,
    parse_hostfile,
    parse_hosts,
    read_hostfile,
    slots_here,
)


def test_hosts_have_slots() -> None:
    assert parse_hosts("a:4,b:2, c") == (Host("a", 4), Host("b", 2), Host("c", 1))


def test_host_file_may_have_comments_and_mpiruns_keywords() -> None:
    text = "# nodes\na slots=4\n\nb   slots = 2 max_slots=4  # two\nc\n"
    assert parse_hostfile(text) == (Host("a", 4), Host("b", 2), Host("c", 1))


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("a:2", Host("a", 2)),
        ("me@node-1.site.org:16 max_slots=32", Host("me@node-1.site.org", 16)),
        ("fe80::1", Host("fe80::1", 1)),
        ("fe80::1 slots=2", Host("fe80::1", 2)),
        ("[fe80::1]:2", Host("fe80::1", 2)),
        ("[fe80::1]", Host("fe80::1", 1)),
        ("::1", Host("::1", 1)),
    ],
)
def test_a_host_file_may_be_a_machine_file_of_hydra(line: str, host: Host) -> None:
    assert parse_hostfile(f"{line}\nb\n") == (host, Host("b", 1))


def test_a_byte_order_mark_is_not_part_of_a_name(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\r\nb:4\r\n", encoding="utf-8-sig")
    assert read_hostfile(path) == (Host("a", 2), Host("b", 4))
    assert parse_discovered("\ufeffa:2\nb:4\n", None) == (Host("a", 2), Host("b", 4))


def test_discovered_hosts_have_a_number_or_the_default() -> None:
    assert parse_discovered("a:4\nb\n", 2) == (Host("a", 4), Host("b", 2))
    with pytest.raises(ConfigError, match="--slots-per-host"):
        parse_discovered("b\n", None)


@pytest.mark.parametrize("text", ["a:x", ":2", "a:2,", "a:-1"])
def test_invalid_host_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="host:slots"):
        parse_hosts(text)


@pytest.mark.parametrize(
    "text", ["", "# only this\n", "a slots=many\n", "a slots=1 b\n", "a:x\n", "a:\n", "a:-1\n", "a:2 slots=2\n"]
)
def test_invalid_host_file_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--hostfile"):
        parse_hostfile(text)


@pytest.mark.parametrize("name", ["node-1.site.org", "me@node_7", "10.0.0.1", "fe80::1", "me@[fe80::1]"])
def test_names_and_addresses_are_hosts(name: str) -> None:
    assert Host(name, 1).name == name


@pytest.mark.parametrize(
    "name",
    [
        *("-v", "-oProxyCommand=touch", "a b", "a\x1b[2J", "a\nb", "a\n", "", "kätzchen", "a" * 256),
        *(f"a{sign}b" for sign in "!\"#$%&'()*+,/;<=>?\\^`{|}~\x07\x7f\u202e"),
    ],
)
def test_a_name_that_ssh_or_a_shell_would_obey_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="invalid host name"):
        Host(name, 1)


def test_the_name_is_refused_wherever_it_comes_from() -> None:
    for read, text in (
        (parse_hosts, "a:1,$(touch owned):2"),
        (parse_hostfile, "a slots=1\n`id` slots=2\n"),
        (lambda text: parse_discovered(text, None), "a:1\nb;c:2\n"),
    ):
        with pytest.raises(ConfigError, match=r"invalid host name .*; fix -H, the host file or the discovery script"):
            read(text)


def test_slots_of_this_machine_add_up_and_others_are_refused() -> None:
    names = names_of_this_machine()
    assert slots_here(parse_hosts(f"localhost:2,127.0.0.1:1,{socket.gethostname()}:3"), names) == 6
    with pytest.raises(ConfigError, match=r"node7 is not this machine"):
        slots_here(parse_hosts("localhost:2,node7:4"), names)


def test_a_number_of_slots_that_no_host_has_is_refused() -> None:
    for read, text in ((parse_hosts, "a:" + "9" * 5000), (parse_hostfile, "a slots=" + "9" * 5000)):
        with pytest.raises(ConfigError):
            read(text)
