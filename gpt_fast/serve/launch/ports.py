"""TorchServe's five ports, and config.properties with them."""

from __future__ import annotations

import errno
import re
import socket

from gpt_fast.errors import ServerError

LOOPBACK = "127.0.0.1"
LOWEST, HIGHEST = 2034, 65533  # of the first port: the others are up to 1010 below it and up to 2 above


def ports_for(base: int) -> dict[str, int]:
    """TorchServe's five ports by their keys in config.properties; the base 8080 gives its own defaults."""
    return {
        "inference_address": base,
        "management_address": base + 1,
        "metrics_address": base + 2,
        "grpc_inference_port": base - 1010,
        "grpc_management_port": base - 1009,
    }


def busy_ports(base: int, host: str = LOOPBACK) -> list[int]:
    """Those of the five that something listens on. Raises OSError for a ``host`` that is none of this machine's."""
    busy = []
    for key, port in ports_for(base).items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host if key == "inference_address" else LOOPBACK, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                busy.append(port)
    return busy


def refuse_busy(base: int, host: str) -> None:
    """Raise ServerError where something listens on a port that TorchServe needs, or ``host`` is not this machine's."""
    if not host:  # which the system takes for all addresses
        raise ServerError("--host is empty. Name an address of this machine, or 0.0.0.0 for all")
    try:
        busy = busy_ports(base, host)
    except OSError as error:
        raise ServerError(f"cannot listen on {host}: {error.strerror}. Name an address of this machine") from error
    if busy:
        named = "port {} is" if len(busy) == 1 else "ports {} are"
        raise ServerError(
            f"{named.format(', '.join(map(str, busy)))} taken by another program. Stop it, or choose other ports: "
            "--port 9080 uses 9080 to 9082, 8070 and 8071"
        )


def derive_config(text: str, base: int, host: str = LOOPBACK) -> str:
    """The ``text`` of config.properties on other ports, the inference port on ``host``. The other addresses keep
    theirs; one that ``text`` does not have is on loopback."""
    ports = ports_for(base)
    kept, hosts = [], {}
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip() not in ports:
            kept.append(line)
        elif match := re.match(r"https?://(.*):\d+$", value.strip()):
            hosts[key.strip()] = match[1]
    hosts["inference_address"] = host
    for key, port in ports.items():
        kept.append(f"{key}=http://{hosts.get(key, LOOPBACK)}:{port}" if key.endswith("address") else f"{key}={port}")
    return "\n".join(kept) + "\n"
