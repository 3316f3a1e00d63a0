"""Redis: one MGET per burst over one connection (TCP, or --unix), the values received straight into their
places (recvmsg with an I/O vector, which saves the copies of a client library). A private redis-server without persistence on a socket of
its own. KVT_REDIS_SERVER names the program."""
import os
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np

import peer_driver

# Measured: 1 to 1024 (IOV_MAX) differ by less than the noise; this one had the best medians.
VECTOR_MAX = 16


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


def scatter(connection, segments):
    """Fills all segments, in order."""
    at, skip = 0, 0
    while at < len(segments):
        window = segments[at:at + VECTOR_MAX]
        if skip:
            window[0] = window[0][skip:]
        got = connection.recvmsg_into(window)[0] + skip
        if got == skip:
            raise RuntimeError("redis closed the connection")
        while at < len(segments) and got >= len(segments[at]):
            got -= len(segments[at])
            at += 1
        skip = got


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
    pool = np.zeros(peer_driver.POOL, dtype=np.uint8)
    places = memoryview(pool)
    bursts = []  # (request, segments of its answer)

    def load(case):
        piece = case["piece"]
        connection.sendall(command(b"FLUSHALL"))
        receive(connection, memoryview(bytearray(5)))
        stored = set()
        bursts.clear()
        head = b"*%d\r\n" % len(case["bursts"][0]["src"])
        value = b"$%d\r\n" % piece
        for burst in case["bursts"]:
            for src in burst["src"]:
                if src in stored:
                    continue
                stored.add(src)
                connection.sendall(command(b"SET", b"%d" % src,
                                           peer_driver.pattern(src, piece).tobytes()))
                receive(connection, memoryview(bytearray(5)))
            segments = [memoryview(bytearray(len(head) + len(value)))]
            between = memoryview(bytearray(2 + len(value)))
            for dst in burst["dst"]:
                segments += [places[dst:dst + piece], between]
            segments[-1] = memoryview(bytearray(2))
            bursts.append((command(b"MGET", *[b"%d" % src for src in burst["src"]]), segments))

    def run():
        for asked, segments in bursts:
            connection.sendall(asked)
            scatter(connection, segments)

    try:
        peer_driver.converse(server.pid, load, run, lambda case: peer_driver.check(pool, case))
    finally:
        server.terminate()
        server.wait(10)


if __name__ == "__main__":
    peer_driver.main(client)
