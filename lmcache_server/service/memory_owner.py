"""Whose memory a registration names, as far as the kernel tells: SO_PEERCRED and /proc."""

import os

from msgspec.structs import replace

from lmcache_client.contract import messages
from lmcache_client.contract.messages import Memory
from lmcache_server.host.machine import is_descendant, process_namespace
from lmcache_server.service.refusals import Refusal
from lmcache_server.transfer.base import HandleError


def with_owner(memory: Memory, peer_pid: int | None) -> Memory:
    """The memory that the client behind `peer_pid` (see PeerPid) registers, with the process id of its owner
    here, or 0 if nobody knows it. Raises Refusal unless the client is the owner or has started it."""
    if memory.device and not memory.descriptors:
        # Such a handle needs no process id. The client's own number may be a stranger's in this namespace.
        return replace(memory, pid=peer_pid or 0)
    if peer_pid is not None and not is_descendant(memory.pid, peer_pid):
        reason = f"process {memory.pid} is not this client, nor was it started by it"
        raise Refusal(messages.NO_ACCESS, f"{reason} (containers: share the pid namespace)")
    return memory


def explained(error: Exception, peer_pid: int | None) -> str:
    """Why the memory of the client behind `peer_pid` was not opened, and what to change."""
    return f"{error}: {closed_to(peer_pid)}" if isinstance(error, HandleError) else str(error)


def closed_to(peer_pid: int | None) -> str:
    """What distinguishes the client behind `peer_pid` from those whose handles CUDA opens here."""
    share = "share it (docker: --pid=host; Kubernetes: hostPID)"
    if peer_pid is None:
        return "both need the same user and, in containers, a shared process namespace (--pid=host)"
    if peer_pid == 0:
        return f"vLLM is in a process namespace that the server does not see: {share}"
    try:
        user = os.stat(f"/proc/{peer_pid}").st_uid
    except OSError:
        return "its process has ended"
    if user != os.geteuid():
        return f"vLLM runs as user {user}, the server as user {os.geteuid()}: run both as one user"
    if process_namespace(peer_pid) != process_namespace("self"):
        return f"vLLM is in another process namespace than the server: {share}"
    return "user and process namespace are the same, so the kernel's log may say more"
