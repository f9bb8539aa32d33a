"""The way from the host to the API server, and the process that keeps the control namespace.

It binds 127.0.0.1 in the host's network namespace and then leaves for a new one: a socket belongs
to the namespace it was made in, so accepted connections are on the host's side and each later
outbound one is inside. The new namespace is the control plane's. It is the ground's only listener
on the host. Run as `python -m tidegate_ground.forward PORT_FILE`.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

from tidegate_ground import linux, network

CHUNK_BYTES = 1 << 18


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies one direction to its end, then closes that direction's writer."""
    try:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # one side is gone; closing tells the other
    finally:
        writer.close()


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Joins one accepted connection to the API server; closes it when that one is down."""
    try:
        there = await asyncio.open_connection(network.GATEWAY, network.API_PORT)
    except OSError:
        writer.close()
        return
    await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))


async def run(listener: socket.socket, port_file: Path) -> None:
    """Accepts connections for ever; the port file appears, whole, once it does."""
    server = await asyncio.start_server(serve, sock=listener)
    partial = port_file.with_suffix(".partial")
    partial.write_text(str(listener.getsockname()[1]))
    partial.rename(port_file)
    await server.serve_forever()


def main() -> None:
    """Runs the forwarder; its argument is the port file."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    linux.unshare(linux.Namespace.NETWORK)
    asyncio.run(run(listener, Path(sys.argv[1])))


if __name__ == "__main__":
    main()
