"""An HTTP proxy that knows CONNECT alone: `python -m cloister.tests.parties.connect_proxy HOST PORT`."""

from __future__ import annotations

import asyncio
import contextlib
import sys


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()
        await writer.wait_closed()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    request = (await reader.readuntil(b"\r\n\r\n")).decode()
    method, address, _ = request.split("\r\n")[0].split(" ")
    assert method == "CONNECT", request
    host, _, port = address.rpartition(":")
    try:
        far_reader, far_writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError:
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
        writer.close()
        return
    print(f"CONNECT {address}", flush=True)
    writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
    await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))


async def main(host: str, port: int) -> None:
    """Serve until the process is ended."""
    server = await asyncio.start_server(_serve, host, port)
    print("ready", flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
