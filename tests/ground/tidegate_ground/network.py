"""The ground's addresses and links.

The same addresses serve every ground, because each has a network namespace of its own. A
namespace lives as long as a process in it, so no mount and no name in /run/netns is ever left.
Nothing is configured in the host's own namespace.
"""

from __future__ import annotations

from tidegate_ground import commands
from tidegate_ground.processes import PidRecord

GATEWAY = "10.89.0.1"
NODE_PREFIX_LENGTH = 24
SERVICE_CIDR = "10.96.0.0/16"
KUBERNETES_SERVICE = "10.96.0.1"
POD_CIDR = "10.90.0.0/16"
API_PORT = 6443


def node_address(number: int) -> str:
    """Returns the address of the node of that number, from 1 on."""
    return f"10.89.0.{10 + number}"


def pod_cidr(number: int) -> str:
    """Returns the pod range of the node of that number."""
    return f"10.90.{number}.0/24"


def enter_network(member: PidRecord) -> list[str]:
    """Returns the head of a command that runs in the network namespace of a process."""
    return ["nsenter", f"--net=/proc/{member.pid}/ns/net", "--"]


def set_up_control(member: PidRecord) -> None:
    """Sets up the control plane's new namespace: a bridge for the nodes, and forwarding."""
    _ip(
        member,
        "link set lo up",
        "link add br0 type bridge",
        f"addr add {GATEWAY}/{NODE_PREFIX_LENGTH} dev br0",
        "link set br0 up",
    )
    _forward_packets(member)


def connect_node(control: PidRecord, init: PidRecord, number: int) -> None:
    """Links a node's new namespace to the bridge and routes its pods there."""
    name, address = f"node{number}", node_address(number)
    # The same hardware address each time: neighbours need not unlearn the one before a restart.
    hardware = f"02:00:0a:59:00:{10 + number:02x}"
    peer = f"peer name eth0 address {hardware} netns {init.pid}"
    _ip(
        control,
        f"link add {name} type veth {peer}",
        f"link set {name} master br0 up",
        f"route replace {pod_cidr(number)} via {address}",
    )
    _ip(
        init,
        "link set lo up",
        f"addr add {address}/{NODE_PREFIX_LENGTH} dev eth0",
        "link set eth0 up",
        f"route add default via {GATEWAY}",
    )
    _forward_packets(init)


def disconnect_node(control: PidRecord, number: int) -> None:
    """Takes the link away at once; the kernel would do it some time after the node's end."""
    link = ("ip", "link", "del", f"node{number}")
    commands.run(*enter_network(control), *link, check=False)


def _ip(member: PidRecord, *lines: str) -> None:
    batch = "".join(f"{line}\n" for line in lines)
    commands.run(*enter_network(member), "ip", "-batch", "-", stdin=batch)


def _forward_packets(member: PidRecord) -> None:
    setting = "echo 1 >/proc/sys/net/ipv4/ip_forward"
    commands.run(*enter_network(member), "sh", "-c", setting)
