"""Mooncake Transfer Engine over TCP: batched reads of scattered blocks (batch_transfer_sync_read), the
engine in peer-to-peer handshake mode, arena and pool registered once. peers_bench sets
MC_TCP_ENABLE_CONNECTION_POOL for the second way of its documentation."""
import os
import sys
import tempfile

import numpy as np

import peer_driver


def engine(buffer):
    from mooncake.engine import TransferEngine
    transfer = TransferEngine()
    # Port 0 is not taken: a free one of ours.
    import socket
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if transfer.initialize(f"127.0.0.1:{port}", "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("initialize failed")
    if transfer.register_memory(buffer.ctypes.data, buffer.size) != 0:
        raise RuntimeError("register_memory failed")
    return transfer


def target(meeting):
    arena = peer_driver.make_arena()
    transfer = engine(arena)
    peer_driver.announce(meeting, f"{transfer.get_rpc_port()} {arena.ctypes.data}")


def client():
    meeting = os.path.join(tempfile.mkdtemp(), "meeting")
    other = peer_driver.start_target([], meeting)
    port, remote = open(meeting).read().split()
    remote = int(remote)
    pool = np.zeros(peer_driver.POOL, dtype=np.uint8)
    transfer = engine(pool)
    peer = f"127.0.0.1:{port}"
    lists = []

    def load(case):
        lists.clear()
        for burst in case["bursts"]:
            lists.append(([pool.ctypes.data + dst for dst in burst["dst"]],
                          [remote + src for src in burst["src"]],
                          [case["piece"]] * len(burst["src"])))

    def run():
        for here, there, lengths in lists:
            if transfer.batch_transfer_sync_read(peer, here, there, lengths) != 0:
                raise RuntimeError("batch_transfer_sync_read failed")

    peer_driver.converse(other.pid, load, run, lambda case: peer_driver.check(pool, case))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--target"]:
        target(sys.argv[2])
    else:
        peer_driver.main(client)
