"""A real nginx with configs/proxy/nginx.conf, in a separate folder and on a separate port."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from waiting import free_port

ROOT = Path(__file__).resolve().parent.parent
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
WHY_NOT = (
    None if NGINX and shutil.which("openssl") else "nginx or openssl is not installed (apt-get install nginx openssl)"
)
HANG_S = 60.0
AROUND = """\
{user}
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/start.log;
events {{ worker_connections 512; }}
http {{
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/site.conf;
}}
"""


class Proxy:
    """nginx in front of the servers on ``ports``. ``keys``: by the names of clients."""

    def __init__(self, folder: Path, ports: Sequence[int], keys: dict[str, str]) -> None:
        assert NGINX is not None
        self.folder, self.port = folder, free_port()
        self._certify()
        lines = [f'"Bearer {key}" "{name}";\n' for name, key in keys.items()]
        (folder / "keys").write_text((ROOT / "configs/proxy/keys.example").read_text() + "".join(lines))
        (folder / "site.conf").write_text(self._site(ports))
        user = "user root;" if os.geteuid() == 0 else ""
        (folder / "nginx.conf").write_text(AROUND.format(folder=folder, user=user))
        command = [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")]
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        deadline = time.monotonic() + HANG_S
        while not self._listens():
            assert self.process.poll() is None, (folder / "output").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def _certify(self) -> None:
        self.certificate = self.folder / "crt"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        command += ["-keyout", str(self.folder / "key"), "-out", str(self.certificate)]
        subprocess.run(command, check=True, capture_output=True)

    def _site(self, ports: Sequence[int]) -> str:
        """The file as it is delivered; what it marks as "yours", and the servers' ports, are those of this test."""
        text = (ROOT / "configs/proxy/nginx.conf").read_text()
        for given, ours in {
            "127.0.0.1:8080": f"127.0.0.1:{ports[0]}",
            "127.0.0.1:9080": f"127.0.0.1:{ports[1]}",
            "listen 443 ssl": f"listen 127.0.0.1:{self.port} ssl",
            "/etc/nginx/gpt-fast-keys": f"{self.folder}/keys",
            "/etc/nginx/gpt-fast.crt": f"{self.folder}/crt",
            "/etc/nginx/gpt-fast.key": f"{self.folder}/key",
            "/var/log/nginx/": f"{self.folder}/log-",
        }.items():
            assert given in text, given
            text = text.replace(given, ours)
        return text

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def connect(self) -> http.client.HTTPSConnection:
        """A connection, encrypted and checked."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=HANG_S, context=context)

    def logs(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("*log*")))

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
