"""A server on loopback that speaks as much of wandb's protocol as a run needs, and can fail."""

from __future__ import annotations

import gzip
import json
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WandbServer:
    """Keeps runs by id: `history` (rows in order), `config`, `finished` (exit code), `files`.

    Attributes:
        fault: None, a status such as 401 or 500, "drop" (closes the connection) or "hang".
    """

    def __init__(self):
        self.fault, self.history, self.config = None, {}, {}
        self.finished, self.files, self.asked = {}, set(), 0
        server = self

        class Handler(_Handler):
            pass

        Handler.state = server
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads, self._http.handle_error = True, lambda *_: None
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def environment(self):
        return {
            "WANDB_BASE_URL": self.url, "WANDB_API_KEY": "0123456789" * 4, "WANDB_MODE": "online",
        }  # fmt: skip

    def close(self):
        self._http.shutdown()
        self._http.server_close()

    def reply(self, path, body):
        """What wandb's own server would say."""
        if path.endswith("/file_stream"):
            return self._stream(path.split("/")[-2], json.loads(body))
        if path.startswith("/graphql"):
            asked = json.loads(body)
            return {"data": self._graphql(asked.get("query", ""), asked.get("variables") or {})}
        return {}

    def _stream(self, run, told):
        rows = self.history.setdefault(run, [])
        history = told.get("files", {}).get("wandb-history.jsonl")
        if history:  # lines that were sent before are written over, as by wandb's server
            rows[history["offset"] :] = [json.loads(line) for line in history["content"]]
        if told.get("complete"):
            self.finished[run] = told.get("exitcode")
        return {"exitcode": None, "limits": {}}

    def _graphql(self, query, given):
        if "RunResumeStatus" in query:
            return {"model": self._project(given) | {"bucket": self._bucket(given["name"])}}
        if "mutation UpsertBucket" in query:
            config = json.loads(given.get("config") or "{}")
            self.config.setdefault(given["name"], {}).update(config)
            known = given["name"] in self.history
            self.history.setdefault(given["name"], [])
            bucket = self._bucket(given["name"]) | {"project": self._project(given)}
            return {"upsertBucket": {"bucket": bucket, "inserted": not known}}
        if "createRunFiles" in query:
            self.files |= set(given["files"])
            files = [{"name": n, "uploadUrl": f"{self.url}/storage/{n}"} for n in given["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        if "viewer" in query:
            return {"viewer": {"id": "v", "entity": "me", "username": "me", "flags": "{}"}}
        if "query ArtifactType" in query:
            return {"project": None}
        if "createArtifact(" in query:
            made = {"id": "a", "state": "COMMITTED", "artifactSequence": {"latestArtifact": None}}
            return {"createArtifact": {"artifact": made}}
        return {}

    @staticmethod
    def _project(given):
        name = given.get("project") or "p"
        return {"id": "p", "name": name, "entity": {"id": "e", "name": "me"}}

    def _bucket(self, run):
        if run not in self.history:
            return None
        tail = json.dumps([json.dumps(row) for row in self.history[run][-1:]])
        return {
            "id": run, "name": run, "displayName": run, "summaryMetrics": "{}", "logLineCount": 0,
            "historyLineCount": len(self.history[run]), "eventsLineCount": 0, "historyTail": tail,
            "eventsTail": "[]", "config": json.dumps(self.config.get(run, {})), "tags": [],
            "notes": None, "wandbConfig": json.dumps({"t": 1}), "description": None,
            "sweepName": None,
        }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.state.asked += 1
        if self.state.fault == "drop":
            self.close_connection = True
            return
        if self.state.fault == "hang":
            time.sleep(10**4)
        status = self.state.fault or 200
        found = {} if status != 200 else self.state.reply(self.path, body)
        text = json.dumps(found).encode()
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    do_GET = do_PUT = do_POST

    def log_message(self, *_):
        pass
