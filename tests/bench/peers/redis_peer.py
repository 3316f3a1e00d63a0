"""Redis: one MGET per burst over one connection (TCP, or --unix), answers received into one buffer; the
scatter into the blocks' places is left out. A private redis-server without persistence on a socket of
its own. KVT_REDIS_SERVER names the program."""
import os
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np

import peer_driver


def command(*words):
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        parts += [b"$%d\r\n" % len(word), word, b"\r\n"]
    return b"".join(parts)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def receive(connection, view):
    got = 0
    while got < len(view):
        size = connection.recv_into(view[got:])
        if size == 0:
            raise RuntimeError("redis closed the connection")
        got += size


def client():
    folder = tempfile.mkdtemp()
    port = free_port()
    path = os.path.join(folder, "redis.sock")
    server = subprocess.Popen(
        [os.environ["KVT_REDIS_SERVER"], "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", path,
         "--save", "", "--appendonly", "no", "--dir", folder], stdin=subprocess.DEVNULL, stdout=sys.stderr)
    deadline = time.monotonic() + 20
    while not os.path.exists(path):
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("redis-server did not start")
        time.sleep(0.05)
    if "--unix" in sys.argv:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
    else:
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    bursts = []
    state = {}

    def load(case):
        piece = case["piece"]
        connection.sendall(command(b"FLUSHALL"))
        receive(connection, memoryview(bytearray(5)))
        stored = set()
        bursts.clear()
        for burst in case["bursts"]:
            for src in burst["src"]:
                if src in stored:
                    continue
                stored.add(src)
                connection.sendall(command(b"SET", b"%d" % src,
                                           peer_driver.pattern(src, piece).tobytes()))
                receive(connection, memoryview(bytearray(5)))
            count = len(burst["src"])
            head = len(b"*%d\r\n" % count)
            each = len(b"$%d\r\n" % piece) + piece + 2
            bursts.append(command(b"MGET", *[b"%d" % src for src in burst["src"]]))
            state.update(head=head, each=each, piece=piece,
                         buffer=memoryview(bytearray(head + count * each)))

    def run():
        for asked in bursts:
            connection.sendall(asked)
            receive(connection, state["buffer"])

    def verify(case):
        piece, head, each = state["piece"], state["head"], state["each"]
        answer = np.frombuffer(state["buffer"], dtype=np.uint8)
        for i, src in enumerate(case["bursts"][-1]["src"]):
            at = head + i * each + each - 2 - piece
            if not np.array_equal(answer[at:at + piece], peer_driver.pattern(src, piece)):
                return f"failed the value of {src} differs"
        return "ok"

    try:
        peer_driver.converse(server.pid, load, run, verify)
    finally:
        server.terminate()
        server.wait(10)


if __name__ == "__main__":
    peer_driver.main(client)
