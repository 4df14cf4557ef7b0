"""A server on loopback that speaks as much of the Hub's API as downloading a model takes."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

COMMIT = "a" * 40


class Handler(BaseHTTPRequestHandler):
    """Answers for the repositories in `server.repositories`: name to folder."""

    def log_message(self, *_args) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlparse(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        for name, folder in self.server.repositories.items():
            if path.startswith(f"/api/models/{name}"):
                revision = path.removeprefix(f"/api/models/{name}").removeprefix("/revision/")
                if path.removeprefix(f"/api/models/{name}").startswith(f"/tree/{COMMIT}"):
                    return self._send(200, json.dumps(self._tree(folder)).encode(), {}, body)
                if revision not in ("main", "", COMMIT):
                    return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
                return self._send(200, json.dumps(self._info(name, folder)).encode(), {}, body)
            if path.startswith(f"/{name}/resolve/"):
                return self._file(folder / path.split("/resolve/")[1].split("/", 1)[1], body)
        return self._send(404, b'{"error": "no"}', {"X-Error-Code": "RepoNotFound"}, body)

    def _info(self, name: str, folder: Path) -> dict:
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        siblings = [{"rfilename": path.relative_to(folder).as_posix(), "size": path.stat().st_size} for path in files]
        return {
            "_id": "1",
            "id": name,
            "modelId": name,
            "sha": COMMIT,
            "private": False,
            "tags": [],
            "siblings": siblings,
        }

    def _tree(self, folder: Path) -> list[dict]:
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return [
            {"type": "file", "path": path.relative_to(folder).as_posix(), "size": path.stat().st_size, "oid": "0" * 40}
            for path in files
        ]

    def _file(self, path: Path, body: bool) -> None:
        if not path.is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if path.suffix == ".safetensors":
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        return self._send(200, content, headers, body)

    def _send(self, status: int, content: bytes, headers: dict, body: bool) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@contextlib.contextmanager
def hub(repositories: dict[str, Path]) -> Iterator[ThreadingHTTPServer]:
    """Serve folders as repositories; the server's `requests` lists what was asked."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.repositories, server.requests = repositories, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
