"""Several "hosts" on one machine: network namespaces, each with its own address, host name and `sshd`.

A `Bed` connects its hosts and a head, from which jobs are started, by veth pairs to a bridge in a separate namespace.
So it does not affect this machine's network, and several beds can run at once. The hosts are as awkward as real ones:
every interface has a different name, each host resolves only its own name, to 127.0.1.1 (as on Debian), only the head's
ssh configuration knows the names, and each host has an interface `docker0` with the same address.

The hosts share this machine's files and process IDs, but each has its own TMPDIR and /dev/shm. It needs root, iproute2,
openssh-server and openssh-client (`missing()` reports what is missing).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil
from time_limits import wait_until

PREFIX = "lockstep-bed"
NAMESPACES = Path("/run/netns")
SUBNET = "10.213.7"
HEAD = "head"
CABLE = "cable0"  # between two hosts

# Variables of the test process that would be wrong on the bed's hosts.
_NOT_THE_HOSTS = ("OMP_NUM_THREADS", "SSH_AUTH_SOCK", "SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY")
_numbers = itertools.count()

_SSHD_CONFIG = """\
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
UseDNS no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
SetEnv TMPDIR={folder}/tmp{imports}
"""

_SSH_CONFIG = """\
Host {name}
  HostName {address}
  HostKeyAlias {key_alias}
  Port {port}
  User root
  IdentityFile {identity}
"""

_SSH_COMMON = """\
Host *
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile none
  StrictHostKeyChecking yes
"""


def missing() -> str:
    """Return why this machine cannot run a bed, or an empty string."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    tools = [tool for tool in ("ip", "tc", "ssh", "ssh-keygen", "unshare") if not shutil.which(tool)]
    tools += [] if _sshd() else ["sshd"]
    if tools:
        return f"{', '.join(tools)} not found (apt-get install openssh-server openssh-client iproute2)"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return ""


class Bed:
    """Hosts `node1` ... `nodeN` and a head; a context manager that leaves nothing behind.

    The ssh configuration also knows names that fail: `ghost` (an unused address), `closed` (nothing listens there),
    `nokey` (node2 refuses the key), `stranger` (node2 with an unknown host key).
    """

    def __init__(self, hosts: int = 2) -> None:
        self.names = [f"node{number}" for number in range(1, hosts + 1)]
        self.addresses = {name: f"{SUBNET}.{number}" for number, name in enumerate(self.names, 1)}
        self.addresses[HEAD] = f"{SUBNET}.100"
        self.interfaces = {name: f"eth{chr(ord('A') + number)}" for number, name in enumerate(self.names)}
        self.interfaces[HEAD] = "uplink0"
        self.folder = Path()
        self._id = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._switch = f"{self._id}-switch"
        self._sshds: dict[str, subprocess.Popen[bytes]] = {}
        self._hidden: list[tuple[str, Path]] = []
        self._cables: list[str] = []  # the namespaces that have one end

    @property
    def ssh_options(self) -> str:
        """Return the options with which plain `ssh` finds the hosts."""
        return f"-F {self.folder / 'ssh_config'}"

    def __enter__(self) -> Bed:
        _sweep()
        self.folder = Path(tempfile.mkdtemp(prefix="bed-"))
        try:
            self._wire()
            self._make_keys()
            for name in self.names:
                self._start_sshd(name)
            for name in self.names:
                self._wait_for_sshd(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process in the namespaces, then remove namespaces, links and files; may be called again."""
        _remove(self._id)
        for sshd in self._sshds.values():
            sshd.wait()
        self._sshds.clear()
        if self.folder != Path():
            shutil.rmtree(self.folder, ignore_errors=True)

    def reset(self) -> None:
        """Restore the hosts: every link up and unlimited, no process running, no temporary files."""
        for name, path in self._hidden:
            _run([*self._in_mounts(name), "umount", str(path)])
        for space in self._cables:
            _ip("-n", space, "link", "delete", CABLE)
        self._hidden.clear()
        self._cables.clear()
        for name in self.addresses:
            self.link_up(name)
            self.limit(name, "")
            for process in self.processes(name):
                _signal(process, signal.SIGKILL)
            for path in self.files(name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def namespace(self, name: str) -> str:
        """Return a host's name for `ip netns`."""
        return f"{self._id}-{name}"

    def temporary(self, name: str) -> Path:
        """Return a host's TMPDIR."""
        return self.folder / name / "tmp"

    def files(self, name: str) -> list[Path]:
        """Return the files in a host's TMPDIR and /dev/shm."""
        return [*self.temporary(name).iterdir(), *self.shared_memory(name).iterdir()]

    def shared_memory(self, name: str) -> Path:
        """Return the folder that is a host's /dev/shm."""
        return self.folder / name / "shm"

    def environment(self, name: str = HEAD) -> dict[str, str]:
        """Return the environment of a login on the host."""
        kept = {key: value for key, value in os.environ.items() if key not in _NOT_THE_HOSTS}
        return {**kept, "TMPDIR": str(self.temporary(name))}

    def at(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` on a host, in the started process itself."""
        script = f'echo {name} >/proc/sys/kernel/hostname; mount --bind {self.shared_memory(name)} /dev/shm; exec "$@"'
        return ["ip", "netns", "exec", self.namespace(name), "unshare", "--uts", "sh", "-c", script, "sh", *command]

    def hide(self, name: str, path: Path) -> None:
        """Let the host not see what is in a folder, until the bed is reset."""
        _run([*self._in_mounts(name), "mount", "-t", "tmpfs", "none", str(path)])
        self._hidden.append((name, path))

    def _in_mounts(self, name: str) -> list[str]:
        return ["nsenter", "--mount", "--target", str(self._sshds[name].pid)]

    def start(self, name: str, command: Sequence[str], **options: object) -> subprocess.Popen[str]:
        """Start a command on a host; `options` are Popen's."""
        options = {"env": self.environment(name), "text": True, **options}
        return subprocess.Popen(self.at(name, command), **options)  # type: ignore[call-overload,no-any-return]

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the processes on a host, except the bed's `sshd`, but including its sessions."""
        own = self._sshds.get(name)
        return [process for process in _processes_in(self.namespace(name)) if not own or process.pid != own.pid]

    def sessions(self, name: str) -> list[psutil.Process]:
        """Return the sshd processes that serve connections to a host."""
        own = psutil.Process(self._sshds[name].pid)
        return [child for child in own.children() if child in self.processes(name)]  # except those not yet reaped

    def kill_sessions(self, name: str) -> int:
        """Cut every ssh connection to a host by killing its sshd's sessions, not the sshd; return their number."""
        return sum(_signal(process, signal.SIGKILL) for process in self.sessions(name))

    def link_down(self, name: str) -> None:
        """Unplug the host from the switch: its interface stays up, without a carrier."""
        _ip("-n", self._switch, "link", "set", self._port(name), "down")

    def link_up(self, name: str) -> None:
        """Plug the host in again."""
        _ip("-n", self._switch, "link", "set", self._port(name), "up")

    def limit_link(self, name: str, other: str, rate: str) -> None:
        """Limit what a host sends to another one, over a cable of their own, until the bed is reset."""
        own, peer = self.namespace(name), self.namespace(other)
        _ip("-n", own, "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", peer)
        for space in (own, peer):
            _ip("-n", space, "link", "set", CABLE, "up")
        _run(["tc", "-n", own, "qdisc", "add", "dev", CABLE, "root", *_shape(rate)])
        _ip("-n", own, "route", "add", f"{self.addresses[other]}/32", "dev", CABLE, "src", self.addresses[name])
        self._cables.append(own)

    def limit(self, name: str, rate: str) -> None:
        """Limit what a host sends and receives to a rate in tc's format, such as 100mbit; "" removes the limit."""
        for space, device in ((self.namespace(name), self.interfaces[name]), (self._switch, self._port(name))):
            subprocess.run(["tc", "-n", space, "qdisc", "del", "dev", device, "root"], capture_output=True, check=False)
            if rate:
                _run(["tc", "-n", space, "qdisc", "add", "dev", device, "root", *_shape(rate)])

    def _port(self, name: str) -> str:
        return f"port-{name}"

    def _wire(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge0", "up")
        for name, address in self.addresses.items():
            space, device, port = self.namespace(name), self.interfaces[name], self._port(name)
            _ip("netns", "add", space)
            hosts = Path("/etc/netns") / space / "hosts"
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
            self.temporary(name).mkdir(parents=True)
            self.shared_memory(name).mkdir()
            _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", device, "netns", space)
            _ip("-n", self._switch, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", space, "link", "add", "docker0", "type", "bridge")
            _ip("-n", space, "address", "add", "172.17.0.1/16", "dev", "docker0")
            _ip("-n", space, "address", "add", f"{address}/24", "dev", device)
            for each in ("lo", "docker0", device):
                _ip("-n", space, "link", "set", each, "up")

    def _make_keys(self) -> None:
        known = []
        for key in ("user_key", "other_key", *(f"{name}/host_key" for name in self.names)):
            path = self.folder / key
            _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "bed", "-f", str(path)])
            if path.name == "host_key":
                known.append(f"{path.parent.name} {path.with_suffix('.pub').read_text()}")
        (self.folder / "known_hosts").write_text("".join(known))
        for name in self.names:
            (self.folder / name / "authorized_keys").write_text((self.folder / "user_key.pub").read_text())
        rows = [(name, self.addresses[name], 22, name, "user_key") for name in self.names]
        last = self.names[-1]
        rows += [
            ("ghost", f"{SUBNET}.250", 22, "ghost", "user_key"),
            ("closed", self.addresses[last], 23, last, "user_key"),
            ("nokey", self.addresses[last], 22, last, "other_key"),
            ("stranger", self.addresses[last], 22, "stranger", "user_key"),
        ]
        blocks = [
            _SSH_CONFIG.format(name=name, address=address, port=port, key_alias=alias, identity=self.folder / identity)
            for name, address, port, alias, identity in rows
        ]
        (self.folder / "ssh_config").write_text("".join(blocks) + _SSH_COMMON.format(folder=self.folder))

    def _start_sshd(self, name: str) -> None:
        folder = self.folder / name
        config = folder / "sshd_config"
        path = os.environ.get("PYTHONPATH")
        imports = f" PYTHONPATH={path}" if path else ""  # hosts import the same modules as the tests
        config.write_text(_SSHD_CONFIG.format(address=self.addresses[name], folder=folder, imports=imports))
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd's privilege separation directory
        command = self.at(name, [_sshd(), "-D", "-f", str(config), "-E", str(folder / "sshd.log")])
        # Its sessions get a login's environment, not that of the tests.
        environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self._sshds[name] = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)

    def _wait_for_sshd(self, name: str) -> None:
        sshd, log = self._sshds[name], self.folder / name / "sshd.log"
        table = Path(f"/proc/{sshd.pid}/net/tcp")

        def listens() -> bool:
            assert sshd.poll() is None, log.read_text()
            return ":0016 00000000:0000 0A" in table.read_text()  # port 22

        wait_until(listens, explain=log.read_text)


def _sshd() -> str:
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""


def _processes_in(namespace: str) -> list[psutil.Process]:
    try:
        wanted = os.stat(NAMESPACES / namespace).st_ino
    except OSError:
        return []
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, psutil.Error):  # it exited, or is a zombie
            if os.stat(f"/proc/{pid}/ns/net").st_ino == wanted:
                found.append(psutil.Process(int(pid)))
    return found


def _sweep() -> None:
    """Remove the beds of test runs that were killed."""
    if not NAMESPACES.is_dir():
        return
    for path in NAMESPACES.glob(f"{PREFIX}-*"):
        pid = path.name.removeprefix(f"{PREFIX}-").split("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            _remove(path.name)


def _remove(prefix: str) -> None:
    """End the processes in the namespaces with this prefix, and remove them; a switch's links are removed with it."""
    for path in sorted(NAMESPACES.glob(f"{prefix}*")):
        for _ in range(20):  # a process may fork during the sweep
            if not sum(_signal(process, signal.SIGKILL) for process in _processes_in(path.name)):
                break
            time.sleep(0.05)
        subprocess.run(["ip", "netns", "del", path.name], capture_output=True, check=False)
        shutil.rmtree(Path("/etc/netns") / path.name, ignore_errors=True)
    with contextlib.suppress(OSError):
        Path("/etc/netns").rmdir()


def _signal(process: psutil.Process, number: int) -> bool:
    try:
        process.send_signal(number)
    except psutil.Error:
        return False
    return True


def _shape(rate: str) -> list[str]:
    return ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _run(command: Iterable[str]) -> None:
    done = subprocess.run([*command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
