"""What a cluster file says of its hosts to whoever starts processes there."""

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from partc.runtime.engines.rank_command import ENVIRONMENT_FILE
from partc.runtime.errors import BadPlan, BadUsage, one_of
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.plan_json import NOT_DECODED
from partc.runtime.transports.locked_sockets import LOCAL

CLUSTER_FILE = "cluster.json"


class Machine(msgspec.Struct, frozen=True):
    """A host. `environment`: what its processes have besides; `python`: the launcher's, if empty."""

    name: str
    address: str = LOCAL
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    python: str = ""


class Machines(msgspec.Struct, frozen=True):
    """The hosts of a cluster, and what mpiexec is told besides."""

    hosts: tuple[Machine, ...] = ()
    mpiexec: tuple[str, ...] = ()

    @classmethod
    def at(cls, addresses: Mapping[str, str]) -> "Machines":
        """Return hosts of which nothing else is known than where they are."""
        return cls(tuple(Machine(name, address) for name, address in addresses.items()))

    def of(self, host: str) -> Machine:
        """Return what is known of a host."""
        return next((machine for machine in self.hosts if machine.name == host), Machine(host))

    @property
    def addresses(self) -> dict[str, str]:
        """Return host -> network name."""
        return {machine.name: machine.address for machine in self.hosts}

    def on(self, nodes: Sequence[str], hosts: Sequence[str]) -> "Machines":
        """Return the same, hosts without addresses being on the nodes that somebody allotted, in order.

        Raises BadUsage where there are fewer nodes than hosts, more than one.
        """
        addressed = any(self.of(host).address != LOCAL for host in hosts)
        if addressed or not nodes or (len(nodes) == 1 and (len(hosts) > 1 or _is_here(nodes[0]))):
            return self
        if len(nodes) < len(hosts):
            raise BadUsage(
                f"the plan has {len(hosts)} hosts, {len(nodes)} nodes are allotted",
                at=f"nodes {', '.join(nodes)}",
                fix="ask for as many nodes, or compile for a cluster of as many hosts",
            )
        at = dict(zip(hosts, nodes, strict=False))
        moved = (msgspec.structs.replace(self.of(host), address=node) for host, node in at.items())
        return Machines(tuple(moved), self.mpiexec)


def machines_of(plan_folder: Path) -> Machines:
    """Return the hosts of the cluster file beside a plan. Raises BadPlan."""
    path = plan_folder / CLUSTER_FILE
    if not path.exists():
        return Machines()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Machines)
    except NOT_DECODED as error:
        raise BadPlan(f"not a cluster: {error}", at=str(path), fix="compile the model again") from error


def machines_at(folder: PlanFolder, addresses: Mapping[str, str] | None) -> Machines:
    """Return the hosts of a plan: where the caller says, or as the cluster file beside the plan has them.

    Raises BadPlan, and BadUsage of a host that the plan has not.
    """
    if addresses is None:
        return machines_of(folder.path)
    hosts = sorted({rank.host for rank in folder.plan.ranks})
    if strays := addresses.keys() - set(hosts):
        stray = min(strays)
        raise BadUsage(f"the plan has no host {stray!r}", at="addresses", fix=one_of(hosts, stray))
    return Machines.at(addresses)


def write_environments(job_folder: Path, members: Mapping[str, str], machines: Machines) -> None:
    """Write what keepers put into the environment of their members (name -> host), if there is anything."""
    environments = {name: machines.of(host).environment for name, host in members.items()}
    if any(environments.values()):
        text = msgspec.json.encode({name: values for name, values in environments.items() if values})
        descriptor = os.open(job_folder / ENVIRONMENT_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)


def _is_here(node: str) -> bool:
    return node.partition(".")[0] == socket.gethostname().partition(".")[0]
