"""Two hosts on this machine: network namespaces of our own, joined by a cable, reached by a stand-in ssh.

Nothing of the machine's own network is touched: all happens inside a user namespace (``unshare``), which
ends with the command. Needs iproute2 and util-linux.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HOSTS", "TwoHosts"]

HOSTS = ("10.77.0.1", "10.77.0.2")

_SCRIPT = """set -eu
mount -t tmpfs tmpfs /run
for name in first second; do
    ip netns add "$name"
    ip -n "$name" link set lo up
done
ip link add eth0 netns first type veth peer name eth0 netns second
ip -n first address add 10.77.0.1/24 dev eth0
ip -n second address add 10.77.0.2/24 dev eth0
ip -n first link set eth0 up
ip -n second link set eth0 up
exec "$@"
"""

_SSH = """#!/bin/bash
# Like ssh: the host, then words that a shell of the other side reads.
while [ "${1:0:1}" = - ]; do shift 2; done
host=$1
shift
case $host in
    10.77.0.1) name=first ;;
    10.77.0.2) name=second ;;
    silent) exec sleep 600 ;;
    *) echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255 ;;
esac
root=$(dirname "$0")
export PATH=$root/$name:$root:$PATH PYTHONPATH=$root/$name/lib
exec ip netns exec "$name" bash -c "$*"
"""


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str


class TwoHosts:
    """A folder with what both hosts have, and what each has alone (``first``, ``second``)."""

    def __init__(self, root: Path) -> None:
        self.bin = root / "bin"
        self.work = root / "work"
        self.work.mkdir()
        self.bin.mkdir()
        self._write("ssh", _SSH)
        self._write("python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        self._write("torchrun", f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
        for name in ("first", "second"):
            (self.bin / name / "lib").mkdir(parents=True)

    def _write(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def devices(self, name: str, device: str, count: int = 1, serial: str = "") -> None:
        """What nvidia-smi says on one of the hosts (name, free MiB, uuid)."""
        lines = "".join(f"echo '{device}, 79000, GPU-{serial or name}-{index}'\n" for index in range(count))
        self._write(f"{name}/nvidia-smi", f"#!/bin/sh\n{lines}")

    def installed(self, name: str, package: str, version: str) -> None:
        """Another version of a package on one of the hosts, as far as its metadata goes."""
        folder = self.bin / name / "lib" / f"{package.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")

    def run(self, *command: str | Path, limit: float = 120, **variables: str) -> Ended:
        """A command in the folder in which training would run, where both hosts can be reached."""
        env = {
            "PATH": f"{self.bin}:{os.environ['PATH']}:/usr/sbin:/sbin",
            "HOME": str(self.work),
            "HAPMOE_SSH": str(self.bin / "ssh"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        done = subprocess.run(
            ["unshare", "--user", "--map-root-user", "--net", "--mount", "bash", "-c", _SCRIPT, "two-hosts", *command],
            cwd=self.work,
            env=env,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)
