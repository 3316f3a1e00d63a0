"""NIXL over its UCX backend: one READ of scattered blocks per burst, descriptor lists and request made
beforehand (they are not timed), memory registered once. UCX_TLS and UCX_NET_DEVICES come from
peers_bench: tcp on lo, or unset for NIXL's best local path."""
import os
import sys
import tempfile

import numpy as np

import peer_driver


def agent(name, buffer):
    from nixl_cu13._api import nixl_agent, nixl_agent_config
    made = nixl_agent(name, nixl_agent_config(True, False, 0, backends=["UCX"]))
    made.register_memory([(buffer.ctypes.data, buffer.size, 0, "")], mem_type="DRAM")
    return made


def target(meeting):
    arena = peer_driver.make_arena()
    made = agent("target", arena)
    peer_driver.announce(meeting, f"{arena.ctypes.data} {made.get_agent_metadata().hex()}")


def client():
    meeting = os.path.join(tempfile.mkdtemp(), "meeting")
    other = peer_driver.start_target([], meeting)
    remote, metadata = open(meeting).read().split()
    remote = int(remote)
    pool = np.zeros(peer_driver.POOL, dtype=np.uint8)
    made = agent("client", pool)
    name = made.add_remote_agent(bytes.fromhex(metadata))
    handles = []

    def load(case):
        for handle in handles:
            made.release_xfer_handle(handle)
        handles.clear()
        piece = case["piece"]
        for burst in case["bursts"]:
            here = made.get_xfer_descs([(pool.ctypes.data + dst, piece, 0) for dst in burst["dst"]],
                                       mem_type="DRAM")
            there = made.get_xfer_descs([(remote + src, piece, 0) for src in burst["src"]],
                                        mem_type="DRAM")
            handles.append(made.initialize_xfer("READ", here, there, name))

    def run():
        for handle in handles:
            state = made.transfer(handle)
            while state != "DONE":
                state = made.check_xfer_state(handle)
                if state == "ERR":
                    raise RuntimeError("the transfer failed")

    peer_driver.converse(other.pid, load, run, lambda case: peer_driver.check(pool, case))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--target"]:
        target(sys.argv[2])
    else:
        peer_driver.main(client)
