"""Runs a program in a namespace without a network, where a port of 127.0.0.1 leads to the endpoint's Unix socket.

    python -I -S -c "$(cat inner_forward.py)" PORT COMMAND...

It is read by a Python without site-packages, so it imports nothing else. It ends with the program's status.
"""

import socket
import subprocess
import sys
import threading

ENDPOINT = "/run/endpoint.sock"


def copy(source: socket.socket, target: socket.socket) -> None:
    """Copies bytes until one side closes."""
    try:
        while part := source.recv(1 << 16):
            target.sendall(part)
        target.shutdown(socket.SHUT_WR)  # half closed: the other direction may still have bytes
    except OSError:
        for each in (source, target):
            each.close()


def serve(listener: socket.socket) -> None:
    """Connects every connection with the endpoint."""
    while True:
        client, _ = listener.accept()
        endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        endpoint.connect(ENDPOINT)
        for pair in ((client, endpoint), (endpoint, client)):
            # a thread per direction: the program may send while it receives
            threading.Thread(target=copy, args=pair, daemon=True).start()


def main() -> int:
    """Runs the command, and returns its status."""
    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=128)
    threading.Thread(target=serve, args=(listener,), daemon=True).start()  # daemons end with the program
    try:
        status = subprocess.run(sys.argv[2:], check=False).returncode
    except OSError as error:
        print(error, file=sys.stderr)
        return 127  # as a shell says that a command was not found
    return status if status >= 0 else 128 - status  # as a shell reports a signal


if __name__ == "__main__":
    sys.exit(main())
