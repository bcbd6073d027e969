"""Runs commands on a simulated host, as sshd or slurmd would: `python -m plugins.hosts.tests.node_server HOST`.

Its client is `python -m plugins.hosts.tests.node_server HOST COMMAND`, which hands its standard input on, prints what
the command prints, and ends with its status. A command runs on if its client ends.
"""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading

from tests.waiting import LIMIT_S

PORT = 26590
_STATUS = re.compile(rb"\0(\d+)\Z")


def run_there(host: str, command: str) -> list[str]:
    """The command line of a client."""
    return [sys.executable, "-m", "plugins.hosts.tests.node_server", host, command]


def serve(host: str) -> None:
    """Serves until this process ends."""
    with socket.create_server((host, PORT)) as server:
        print("ready", flush=True)
        while True:
            threading.Thread(target=_run, args=(server.accept()[0],), daemon=True).start()


def _run(connection: socket.socket) -> None:
    with connection:
        command = bytearray()
        while not command.endswith(b"\0"):
            command += connection.recv(1)
        end = connection.fileno()
        process = subprocess.Popen(["sh", "-c", command[:-1].decode()], stdin=end, stdout=end, stderr=end)
        status = process.wait()
        with contextlib.suppress(OSError):
            connection.sendall(b"\0%d" % status)


def client(host: str, command: str) -> int:
    """Runs a command there. Returns its status."""
    try:
        connection = socket.create_connection((host, PORT), timeout=LIMIT_S)
    except OSError as error:
        print(f"ssh: connect to host {host} port 22: {error.strerror}", file=sys.stderr)
        return 255
    connection.settimeout(None)
    connection.sendall(command.encode() + b"\0")
    threading.Thread(target=_send_input, args=(connection,), daemon=True).start()
    held = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            held += data
            text, mark, rest = held.partition(b"\0")
            os.write(1, text)
            held = mark + rest
    status = _STATUS.search(held)
    return int(status[1]) if status else 255


def _send_input(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(0, 1 << 16):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    sys.exit(client(sys.argv[1], sys.argv[2]))
