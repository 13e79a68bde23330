"""A stand-in for the Hugging Face hub on this machine: folders as models, and a count of the files that were sent."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

GATED = "org/gated"


class HubStandIn:
    """Models by name, each with a folder per revision.

    Attributes:
        models: folder of a model's revision, by name and revision.
        sent: files that were sent whole, as `NAME/FILE`.
        tokens: values of the header `Authorization`, of all requests.
        url: the address.
    """

    def __init__(self) -> None:
        self.models: dict[tuple[str, str], Path] = {}
        self.sent: list[str] = []
        self.tokens: set[str | None] = set()
        self.url = ""

    def add(self, name: str, folder: Path, revision: str = "main") -> str:
        """Offer a folder as a model; return the commit."""
        commit = hashlib.sha1(f"{name}@{revision}".encode()).hexdigest()
        for each in (revision, commit):
            self.models[name, each] = folder
        return commit

    def commit(self, name: str, revision: str) -> str | None:
        """Return the commit of a revision, None if there is none."""
        folder = self.models.get((name, revision))
        commits = (kept for (own, kept), where in self.models.items() if (own, where) == (name, folder))
        return next((kept for kept in commits if len(kept) == 40), None)


@contextmanager
def hub_stand_in() -> Iterator[HubStandIn]:
    """Serve on a free port of this machine."""
    hub = HubStandIn()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            hub.tokens.add(self.headers.get("Authorization"))
            parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
            is_api = parts[:2] == ["api", "models"]
            if len(parts) < 5:
                self._fail("RepoNotFound", 404)
                return
            name = "/".join(parts[2:4] if is_api else parts[:2])
            revision = parts[5] if is_api else parts[3]
            commit = hub.commit(name, revision)
            if name == GATED:
                self._fail("GatedRepo", 403)
            elif not any(own == name for own, _ in hub.models):
                self._fail("RepoNotFound", 404)
            elif commit is None:
                self._fail("RevisionNotFound", 404)
            elif is_api and parts[4] == "revision":
                self._send_json({"id": name, "modelId": name, "sha": commit, "siblings": [], "tags": []})
            elif is_api:
                files = sorted(file for file in hub.models[name, revision].rglob("*") if file.is_file())
                self._send_json([self._entry(file, hub.models[name, revision]) for file in files])
            else:
                self._send_file(name, commit, "/".join(parts[4:]))

        def _entry(self, file: Path, folder: Path) -> dict[str, Any]:
            digest = hashlib.sha1(file.read_bytes()).hexdigest()
            return {
                "type": "file",
                "path": str(file.relative_to(folder)),
                "size": file.stat().st_size,
                "oid": digest,
            }

        def _send_json(self, value: Any) -> None:
            self._send(json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send_file(self, name: str, commit: str, path: str) -> None:
            file = hub.models[name, commit] / path
            if not file.is_file():
                self._fail("EntryNotFound", 404)
                return
            content = file.read_bytes()
            if self.command == "GET":
                hub.sent.append(f"{name}/{path}")
            self._send(content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit})

        def _fail(self, code: str, status: int) -> None:
            self._send(b"", {"X-Error-Code": code}, status)

        def _send(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
